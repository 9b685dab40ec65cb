#include "train/store/run_state.h"

#include "base/json_text.h"
#include "train/store/state_files.h"

#include <reprise/base/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <system_error>

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
  for (size_t i = 0; i < text.size(); i += 2) {
    const char* const digits = text.data() + i;
    const size_t count = std::min<size_t>(2, text.size() - i);
    unsigned value = 0;
    const auto [rest, error] =
        std::from_chars(digits, digits + count, value, 16);
    if (error != std::errc{} || rest != digits + 2) {
      throw Error("expected bytes as pairs of hexadecimal digits");
    }
    bytes += static_cast<char>(value);
  }
  return bytes;
}

/// Throws unless all values are such that a training can have saved them.
void check(const RunState& s) {
  for (const int64_t count :
       {s.step, s.micro, s.position.epoch, s.position.sample,
        s.scaler.good_updates, s.scaler.skipped, s.samples, s.metrics_bytes}) {
    if (count < 0 || count > int64_t{1} << 60) {
      throw Error(fmt::format("expected counts, got {}", count));
    }
  }
  for (const double value :
       {s.total_count, s.done_count, s.train_s, double{s.scaler.scale}}) {
    if (!std::isfinite(value) || value < 0) {
      throw Error(fmt::format("expected positive numbers, got {}", value));
    }
  }
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
  const std::string limit = why_not_parsed(text);
  if (!limit.empty()) throw Error(limit);
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
  check(s);
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
