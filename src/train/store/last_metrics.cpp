#include "train/store/last_metrics.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string_view>

namespace reprise::detail {
namespace {

using nlohmann::json;

constexpr std::string_view kEvaluated = "eval_";
/// The last evaluation may be many updates back.
constexpr std::streamoff kMostBytes = std::streamoff{16} << 20;

/// A number, or the text of one that JSON cannot represent.
std::optional<double> number_in(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (!value.is_string()) return std::nullopt;
  return std::strtod(value.get<std::string>().c_str(), nullptr);
}

/// The last part of a file, without the line that it begins in.
std::string end_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = file ? std::streamoff{file.tellg()} : 0;
  const std::streamoff from = std::max(std::streamoff{0}, size - kMostBytes);
  std::string text(
      static_cast<size_t>(std::max(std::streamoff{0}, size - from)), '\0');
  file.seekg(from);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(std::max(std::streamsize{0}, file.gcount())));
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
    const json line = json::parse(text.substr(from, end - from), nullptr,
                                  /*allow_exceptions=*/false);
    if (line.is_object()) add_line(summary, line);
    end = before;
  }
}

}  // namespace reprise::detail
