#include "train/store/run_state.h"

#include "train/store/state_files.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <string>

namespace reprise::detail {
namespace {

using nlohmann::json;

/// Any bytes as text: JSON has no others than those of UTF-8.
std::string hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  }
  return text;
}

std::string from_hex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

}  // namespace

std::string to_text(const RunState& s) {
  return json{{"format", RunState().format},
              {"step", s.step},
              {"micro", s.micro},
              {"total_count", s.total_count},
              {"done_count", s.done_count},
              {"epoch", s.position.epoch},
              {"sample", s.position.sample},
              {"stream", hex(s.position.stream)},
              {"scale", s.scaler.scale},
              {"good_updates", s.scaler.good_updates},
              {"skipped", s.scaler.skipped},
              {"samples", s.samples},
              {"train_s", s.train_s},
              {"metrics_bytes", s.metrics_bytes},
              {"evaluation_due", s.evaluation_due},
              {"finished", s.finished},
              {"data", s.data}}
      .dump();
}

RunState run_state_from_text(const std::string& text) {
  const json j = json::parse(text);
  RunState s;
  s.step = j.at("step");
  s.micro = j.at("micro");
  s.total_count = j.at("total_count");
  s.done_count = j.at("done_count");
  s.position = {j.at("epoch"), j.at("sample"), from_hex(j.value("stream", ""))};
  s.scaler.scale = j.at("scale");
  s.scaler.good_updates = j.at("good_updates");
  s.scaler.skipped = j.at("skipped");
  s.samples = j.at("samples");
  s.train_s = j.at("train_s");
  s.metrics_bytes = j.at("metrics_bytes");
  s.evaluation_due = j.at("evaluation_due");
  s.finished = j.at("finished");
  s.data = j.value("data", "");
  s.format = j.value("format", 1);
  return s;
}

void save_state(const RunDirectory& directory, const RunState& state,
                const NamedTensors& tensors, int keep) {
  save_state(directory, state, /*ranks=*/1, {tensors, {}}, keep);
}

std::optional<SavedState> newest_state(
    const RunDirectory& directory,
    const std::function<void(const std::string&)>& warn) {
  const auto files = StateFiles::newest(directory, warn);
  if (!files) return std::nullopt;
  SavedState saved{files->path(), files->state(), {}};
  for (const auto& item : files->tensors()) {
    saved.tensors.emplace_back(item.first, files->read(item.first));
  }
  return saved;
}

}  // namespace reprise::detail
