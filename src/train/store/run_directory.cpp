#include "base/append_log.h"
#include "base/file.h"

#include <reprise/memory/out_of_memory.h>
#include <reprise/train/run_directory.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/file.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace reprise {
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

bool holds_a_run(const std::string& path) {
  return fs::exists(path + "/config.json");
}

int lock(const std::string& path) {
  const int descriptor =
      ::open((path + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  TORCH_CHECK(descriptor >= 0, "[run] cannot write in ", path, ": ",
              std::strerror(errno));
  if (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    close(descriptor);
    TORCH_CHECK(false, "[run] another process is training in ", path);
  }
  return descriptor;
}

}  // namespace

std::string to_text(const RunState& s) {
  return json{{"step", s.step},
              {"micro", s.micro},
              {"total_count", s.total_count},
              {"done_count", s.done_count},
              {"epoch", s.position.epoch},
              {"sample", s.position.sample},
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
  s.position = {j.at("epoch"), j.at("sample")};
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

RunDirectory::RunDirectory(std::string path, int lock)
    : path_(std::move(path)), lock_(lock) {}

RunDirectory::~RunDirectory() {
  if (lock_ >= 0) close(lock_);
}

RunDirectory::RunDirectory(RunDirectory&& other) noexcept
    : path_(std::move(other.path_)), lock_(std::exchange(other.lock_, -1)) {}

RunDirectory& RunDirectory::operator=(RunDirectory&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(lock_, other.lock_);
  return *this;
}

RunDirectory RunDirectory::create(const std::string& path,
                                  const TrainConfig& config) {
  std::error_code error;
  fs::create_directories(path, error);
  TORCH_CHECK(!error, "[run] cannot make the directory ", path, ": ",
              error.message());
  TORCH_CHECK(!holds_a_run(path), "[run] ", path,
              " holds a run already; continue it with --resume ", path,
              ", or name another directory with --out");
  RunDirectory directory(path, lock(path));
  directory.set_config(config);
  return directory;
}

RunDirectory RunDirectory::open(const std::string& path) {
  TORCH_CHECK(holds_a_run(path), "[run] ", path,
              " holds no run (no config.json there)");
  return {path, lock(path)};
}

TrainConfig RunDirectory::config() const {
  return config_from_json(read_text(path_ + "/config.json"));
}

void RunDirectory::set_config(const TrainConfig& config) {
  AtomicFile file(path_ + "/config.json");
  file.write(to_json(config) + "\n");
  file.commit();
}

void RunDirectory::save(const RunState& state, const NamedTensors& tensors,
                        int keep) {
  write_safetensors(fmt::format("{}/state-{:010}-{:06}.safetensors", path_,
                                state.step, state.micro),
                    tensors, {{kMetadataKey, to_text(state)}});
  auto states = states_in(path_);
  while (states.size() > static_cast<size_t>(keep)) {
    fs::remove(states.front());
    states.erase(states.begin());
  }
  // Remove the temporary files of killed processes.
  for (const auto& entry : fs::directory_iterator(path_)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("state-") && !name.ends_with(".safetensors")) {
      fs::remove(entry.path());
    }
  }
}

std::optional<RunDirectory::Saved> RunDirectory::newest(
    const std::function<void(const std::string&)>& warn) const {
  auto states = states_in(path_);
  for (; !states.empty(); states.pop_back()) {
    const std::string& path = states.back();
    try {
      const SafeTensors file(path);
      Saved saved{
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

MetricsLog::MetricsLog(const std::string& path, int64_t keep_bytes)
    : log_(std::make_unique<detail::AppendLog>(path, "metrics")) {
  log_->truncate(keep_bytes);
}

MetricsLog::~MetricsLog() = default;

void MetricsLog::write(const std::string& line) {
  log_->append(line + "\n");
}

void MetricsLog::sync() {
  // Ignore errors: if the disk fails here, saving the state fails as well.
  log_->sync();
}

int64_t MetricsLog::bytes() const {
  return log_->bytes();
}

}  // namespace reprise
