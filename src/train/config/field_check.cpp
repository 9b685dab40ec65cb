#include "base/nearest.h"

#include <reprise/base/bytes.h>
#include <reprise/base/error.h>
#include <reprise/models/model.h>
#include <reprise/recompute/strategy.h>
#include <reprise/train/field_check.h>
#include <reprise/train/optimizer.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <thread>
#include <utility>

namespace reprise {
namespace {

constexpr uint64_t kMostUpdates = 1'000'000'000'000;
constexpr uint64_t kMostSamples = 1'000'000'000;
constexpr size_t kLongList = 8;
constexpr int64_t kKibi = 1024;

/// `text` without the "[function] " that the library's error messages begin with.
std::string without_function(const std::string& text) {
  const size_t end = text.find("] ");
  return text.starts_with("[") && end != std::string::npos
             ? text.substr(end + 2)
             : text;
}

/// Long values would fill the screen.
std::string in_quotes(const std::string& text) {
  constexpr size_t kMost = 60;
  return text.size() <= kMost ? "'" + text + "'"
                              : "'" + text.substr(0, kMost) + "…'";
}

std::string check_whole(const std::string& text, int64_t low, uint64_t high) {
  const char* begin = text.data();
  const char* end = begin + text.size();
  int64_t negative = 0;
  uint64_t value = 0;
  const bool is_negative = text.starts_with("-");
  const auto [rest, error] = is_negative ? std::from_chars(begin, end, negative)
                                         : std::from_chars(begin, end, value);
  // CLI11 would read 010 in base 8.
  const bool octal = text.size() > 1 && text[0] == '0';
  const bool whole = error == std::errc{} && rest == end && !octal;
  const bool inside =
      is_negative
          ? negative >= low
          : value <= high && (low <= 0 || value >= static_cast<uint64_t>(low));
  if (whole && inside) return "";
  return fmt::format("expected a whole number from {} to {}, got {}", low, high,
                     in_quotes(text));
}

std::string check_real(const std::string& text, double low, double high,
                       Ends ends) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const bool number = !text.empty() && *end == '\0' && std::isfinite(value) &&
                      std::isspace(static_cast<unsigned char>(text[0])) == 0;
  const bool above = ends == Ends::kNone ? value > low : value >= low;
  const bool below = ends == Ends::kBoth ? value <= high : value < high;
  if (number && above && below) return "";
  const char* from = ends == Ends::kNone ? "above" : "from";
  const char* to = ends == Ends::kBoth ? "to" : "to below";
  return fmt::format("expected a number {} {:g} {} {:g}, got {}", from, low, to,
                     high, in_quotes(text));
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const ModelInfo& info : model_list()) names.push_back(info.name);
  return names;
}

/// A few times the machine's: more threads than that hang instead of helping.
uint64_t most_threads() {
  return std::max(64U, 4 * std::thread::hardware_concurrency());
}

std::map<std::string, FieldCheck, std::less<>> make_checks() {
  const FieldCheck updates = whole_number(0, kMostUpdates);
  const FieldCheck beta = real_number(0, 1, Ends::kLow);
  return {
      {"--model", one_of(model_names())},
      {"--depth", whole_number(1, 1 << 14)},
      {"--width", whole_number(1, 1 << 18)},
      {"--heads", whole_number(1, 1 << 14)},
      {"--classes", whole_number(1, 1 << 24)},
      {"--vocab", whole_number(1, 1 << 24)},
      {"--seq", whole_number(1, 1 << 24)},
      {"--image-size", whole_number(1, 1 << 14)},
      {"--channels", whole_number(1, 1 << 12)},
      {"--norm", one_of({"batch", "group"})},
      {"--dropout", real_number(0, 1, Ends::kLow)},
      {"--random-samples", whole_number(1, kMostSamples)},
      {"--resize", one_of({"device", "workers"})},
      {"--layout", one_of({"planes", "channels-last"})},
      {"--fp32-products", one_of({"auto", "library"})},
      {"--workers", whole_number(0, most_threads())},
      {"--batch", whole_number(1, 1 << 24)},
      {"--accumulate", whole_number(1, 1 << 24)},
      {"--global-batch", whole_number(1, kMostSamples)},
      {"--ranks", whole_number(1, 4096)},
      {"--shard", one_of({"optimizer"})},
      {"--reduce", one_of({"fp32", "bf16"})},
      {"--bucket", byte_size(kKibi)},
      {"--recompute", recompute_text()},
      {"--graph", one_of({"auto", "on", "off"})},
      {"--weight-copies", one_of({"auto", "on", "each", "off"})},
      {"--host-memory", one_of({"auto", "off"})},
      {"--precision", one_of({"fp32", "bf16", "fp16"})},
      {"--loss-scale", real_number(0, 1e30, Ends::kNone)},
      {"--optimizer", one_of(optimizer_names())},
      {"--momentum", beta},
      {"--beta1", beta},
      {"--beta2", beta},
      {"--weight-decay", real_number(0, 1000)},
      {"--lr", real_number(0, 1000)},
      {"--lr-schedule", one_of({"constant", "cosine"})},
      {"--warmup", updates},
      {"--lr-lowest", real_number(0, 1000)},
      {"--scale-lr", one_of({"linear", "sqrt"})},
      {"--base-batch", whole_number(1, kMostSamples)},
      {"--clip", real_number(0, 1e9)},
      {"--steps", whole_number(1, kMostUpdates)},
      {"--epochs", whole_number(1, kMostSamples)},
      {"--seconds", real_number(0, 1e9)},
      {"--eval-every", updates},
      {"--device", device_name()},
      {"--memory", byte_size(1)},
      {"--seed", whole_number(0, std::numeric_limits<uint64_t>::max())},
      {"--threads", whole_number(0, most_threads())},
      {"--save-every", updates},
      {"--keep", whole_number(1, 1000)},
  };
}

}  // namespace

FieldCheck whole_number(int64_t low, uint64_t high) {
  return [=](const std::string& text) { return check_whole(text, low, high); };
}

FieldCheck real_number(double low, double high, Ends ends) {
  return [=](const std::string& text) {
    return check_real(text, low, high, ends);
  };
}

FieldCheck one_of(std::vector<std::string> words) {
  return [words = std::move(words)](const std::string& text) -> std::string {
    if (std::find(words.begin(), words.end(), text) != words.end()) return "";
    const std::string hint = did_you_mean(text, words);
    if (words.size() > kLongList && !hint.empty()) {
      return fmt::format("unknown name {}{}", in_quotes(text), hint);
    }
    return fmt::format("expected {}{}, got {}{}",
                       words.size() > 1 ? "one of " : "",
                       fmt::join(words, ", "), in_quotes(text), hint);
  };
}

FieldCheck byte_size(int64_t least) {
  return [least](const std::string& text) -> std::string {
    int64_t bytes = 0;
    try {
      bytes = parse_bytes(text);
    } catch (const Error& error) {
      return without_function(error.what());
    }
    if (bytes >= least) return "";
    return fmt::format(
        "expected at least {}, got {}, which is {} bytes; name a unit, such as "
        "25MiB",
        format_bytes(least), in_quotes(text), bytes);
  };
}

FieldCheck device_name(std::vector<std::string> also) {
  return [also = std::move(also)](const std::string& text) -> std::string {
    if (std::find(also.begin(), also.end(), text) != also.end()) return "";
    if (text == "cpu" || text == "cuda") return "";
    constexpr std::string_view kIndexed = "cuda:";
    constexpr uint64_t kMostDevices = 127;
    if (text.starts_with(kIndexed) &&
        check_whole(text.substr(kIndexed.size()), 0, kMostDevices).empty()) {
      return "";
    }
    std::vector<std::string> words = also;
    words.insert(words.end(), {"cpu", "cuda"});
    return fmt::format(
        "expected {}cpu, cuda or cuda:N, got {}{}",
        also.empty() ? "" : also.front() + ", ", in_quotes(text),
        text.find(':') == std::string::npos ? did_you_mean(text, words) : "");
  };
}

FieldCheck strategy_text(std::vector<std::string> also) {
  return [also = std::move(also)](const std::string& text) -> std::string {
    if (std::find(also.begin(), also.end(), text) != also.end()) return "";
    try {
      Strategy::parse(text);
      return "";
    } catch (const c10::Error& error) {
      std::vector<std::string> words = strategy_names();
      words.insert(words.end(), also.begin(), also.end());
      // Compared without what follows the colon.
      const std::string given = text.substr(0, text.find(':'));
      std::vector<std::string> stems;
      for (const std::string& word : words) {
        stems.push_back(word.substr(0, word.find(':')));
        if (stems.back() == given) {
          return without_function(error.what_without_backtrace());
        }
      }
      const auto at =
          std::find(stems.begin(), stems.end(), nearest(given, stems));
      const std::string hint =
          at == stems.end()
              ? ""
              : fmt::format("; did you mean {}?",
                            words[static_cast<size_t>(at - stems.begin())]);
      return fmt::format("expected one of {}, got {}{}", fmt::join(words, ", "),
                         in_quotes(text), hint);
    }
  };
}

FieldCheck recompute_text() {
  return [strategy = strategy_text({"optimal"})](const std::string& text) {
    return is_schedule_text(text) ? std::string() : strategy(text);
  };
}

const FieldCheck* field_check(std::string_view flag) {
  static const auto checks = make_checks();
  const auto found = checks.find(flag);
  return found == checks.end() ? nullptr : &found->second;
}

}  // namespace reprise
