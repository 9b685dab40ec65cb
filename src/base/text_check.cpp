#include "base/text_check.h"

#include "base/nearest.h"

#include <reprise/base/bytes.h>
#include <reprise/base/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <utility>

namespace reprise {
namespace {

constexpr size_t kLongList = 8;

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

}  // namespace

bool is_plain_name(const std::string& text) {
  const auto plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' ||
           c == '-' || c == '_';
  };
  return !text.empty() && text.front() != '-' &&
         std::all_of(text.begin(), text.end(), plain);
}

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const size_t more = byte < 0x80             ? 0
                        : (byte & 0xE0) == 0xC0 ? 1
                        : (byte & 0xF0) == 0xE0 ? 2
                        : (byte & 0xF8) == 0xF0 ? 3
                                                : 4;
    if (more > 3 || more >= text.size() - i) return false;
    uint32_t code = byte & (more == 0 ? 0x7Fu : 0x3Fu >> more);
    for (size_t k = 1; k <= more; ++k) {
      const auto next = static_cast<unsigned char>(text[i + k]);
      if ((next & 0xC0) != 0x80) return false;
      code = code << 6 | (next & 0x3Fu);
    }
    // A shorter form exists, it is half of a UTF-16 pair, or there is no such character.
    constexpr uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    const bool half = code >= 0xD800 && code < 0xE000;
    if (code < kLeast[more] || half || code > 0x10FFFF) return false;
    i += more + 1;
  }
  return true;
}

std::string shortened(const std::string& text, size_t most) {
  if (text.size() <= most) return text;
  size_t end = most;  // not inside a character of several bytes
  while (end + 4 > most && end > 0 &&
         (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) {
    --end;
  }
  return text.substr(0, end) + "…";
}

std::string in_quotes(const std::string& text) {
  return "'" + shortened(text, 60) + "'";
}

std::string quoted_name(const std::string& name) {
  return "'" + shortened(name, 120) + "'";
}

std::string without_origin(const std::string& message) {
  const size_t end = message.find("] ");
  if (!message.starts_with("[") || end == std::string::npos) return message;
  const std::string rest = message.substr(end + 2);
  return message.starts_with("[--") ? message.substr(1, end - 1) + ": " + rest
                                    : rest;
}

TextCheck whole_number(int64_t low, uint64_t high) {
  return [=](const std::string& text) { return check_whole(text, low, high); };
}

TextCheck real_number(double low, double high, Ends ends) {
  return [=](const std::string& text) {
    return check_real(text, low, high, ends);
  };
}

TextCheck one_of(std::vector<std::string> words) {
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

TextCheck byte_size(int64_t least) {
  return [least](const std::string& text) -> std::string {
    int64_t bytes = 0;
    try {
      bytes = parse_bytes(text);
    } catch (const Error& error) {
      return without_origin(error.what());
    }
    if (bytes >= least) return "";
    return fmt::format(
        "expected at least {}, got {}, which is {} bytes; name a unit, such as "
        "25MiB",
        format_bytes(least), in_quotes(text), bytes);
  };
}

}  // namespace reprise
