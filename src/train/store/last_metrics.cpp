#include "train/store/last_metrics.h"

#include "base/input_file.h"
#include "base/json_text.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string_view>

namespace reprise::detail {
namespace {

using nlohmann::json;

constexpr std::string_view kEvaluated = "eval_";
/// The last evaluation may be many updates back.
constexpr uint64_t kMostBytes = uint64_t{16} << 20;

/// A number, or the text of one that JSON cannot represent.
std::optional<double> number_in(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (!value.is_string()) return std::nullopt;
  return std::strtod(value.get<std::string>().c_str(), nullptr);
}

/// The last part of a file, without the line that it begins in; empty if there is none.
std::string end_of_file(const std::string& path) {
  if (!std::filesystem::exists(path)) return "";
  const InputFile file(path);
  const uint64_t from = file.size() - std::min(file.size(), kMostBytes);
  std::string text(file.size() - from, '\0');
  text.resize(file.read_some(from, text.data(), text.size()));
  return from == 0 ? text : text.substr(std::min(text.find('\n'), text.size()));
}

/// Lines of updates have a loss, those of evaluations eval_loss.
void add_line(TrainSummary& summary, const json& line) {
  if (!summary.loss && line.contains("loss")) {
    summary.loss = number_in(line["loss"]);
  }
  if (summary.eval_loss || !line.contains("eval_loss")) return;
  summary.eval_loss = number_in(line["eval_loss"]);
  for (const auto& [name, value] : line.items()) {
    if (!name.starts_with(kEvaluated) || name == "eval_loss") continue;
    if (const auto number = number_in(value)) {
      summary.eval_metrics[name.substr(kEvaluated.size())] = *number;
    }
  }
}

}  // namespace

void add_last_metrics(TrainSummary& summary, const std::string& path) {
  const std::string text = end_of_file(path);
  size_t end = text.rfind('\n');
  while (end != std::string::npos && end > 0 &&
         !(summary.loss && summary.eval_loss)) {
    const size_t before = text.rfind('\n', end - 1);
    const size_t from = before == std::string::npos ? 0 : before + 1;
    const json line =
        parse_json(std::string_view(text).substr(from, end - from));
    if (line.is_object()) add_line(summary, line);
    end = before;
  }
}

}  // namespace reprise::detail
