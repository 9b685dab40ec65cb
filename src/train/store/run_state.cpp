#include "train/store/run_state.h"

#include <reprise/memory/meter.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

namespace reprise::detail {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kMetadataKey = "reprise";

/// Returns the paths of the states in `path`, oldest first.
std::vector<std::string> states_in(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(path)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("state-") && name.ends_with(".safetensors")) {
      names.push_back(entry.path());
    }
  }
  std::sort(names.begin(), names.end());  // their numbers have a fixed width
  return names;
}

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
  return json{{"step", s.step},
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
              {"finished", s.finished}}
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
  return s;
}

void save_state(const RunDirectory& directory, const RunState& state,
                const NamedTensors& tensors, int keep) {
  const std::string& path = directory.path();
  write_safetensors(fmt::format("{}/state-{:010}-{:06}.safetensors", path,
                                state.step, state.micro),
                    tensors, {{kMetadataKey, to_text(state)}});
  auto states = states_in(path);
  while (states.size() > static_cast<size_t>(keep)) {
    fs::remove(states.front());
    states.erase(states.begin());
  }
  // Remove the temporary files of killed processes.
  for (const auto& entry : fs::directory_iterator(path)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("state-") && !name.ends_with(".safetensors")) {
      fs::remove(entry.path());
    }
  }
}

std::optional<SavedState> newest_state(
    const RunDirectory& directory,
    const std::function<void(const std::string&)>& warn) {
  auto states = states_in(directory.path());
  for (; !states.empty(); states.pop_back()) {
    const std::string& path = states.back();
    try {
      const SafeTensors file(path);
      SavedState saved{
          path, run_state_from_text(file.metadata().at(kMetadataKey)), {}};
      for (const auto& [name, entry] : file.entries()) {
        saved.tensors.emplace_back(name, file.read(name));
      }
      return saved;
    } catch (const c10::Error& error) {
      // The file may be intact: do not fall back to an older one.
      if (is_out_of_memory(error)) throw;
      warn(error.what_without_backtrace());
    } catch (const std::exception& error) {
      warn(path + ": " + error.what());
    }
  }
  return std::nullopt;
}

}  // namespace reprise::detail
