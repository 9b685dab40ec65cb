#pragma once

#include <reprise/data/loader.h>
#include <reprise/data/safetensors.h>
#include <reprise/train/config.h>
#include <reprise/train/scaler.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace reprise {

namespace detail {
class AppendLog;
}

/// Progress of a training, without its tensors.
struct RunState {
  int64_t step = 0;        ///< updates done
  int64_t micro = 0;       ///< micro-batches done in the current window
  double total_count = 0;  ///< samples or tokens of the current window
  double done_count = 0;   ///< those of them that are done
  LoaderPosition position{};
  GradScaler::State scaler{};
  int64_t samples = 0;        ///< samples trained on so far
  double train_s = 0;         ///< seconds of training so far
  int64_t metrics_bytes = 0;  ///< length of metrics.jsonl at this point
  /// The training was stopped during an evaluation, which must be repeated.
  bool evaluation_due = false;
  bool finished = false;  ///< the training has reached its end
};

/// Returns `state` in the format of a state file.
std::string to_text(const RunState& state);

/// Parses the result of to_text(). Throws std::exception if `text` is not a
/// state.
RunState run_state_from_text(const std::string& text);

/// Directory of a run:
///
///     config.json                       resolved configuration
///     metrics.jsonl                     one line per update or evaluation
///     state-STEP-MICRO.safetensors      the most recent states
///
/// All files except the metrics are written atomically, so that a state is
/// either complete or absent even if the process is killed. The directory is
/// locked by one process at a time; the lock ends with the process.
class RunDirectory {
 public:
  /// Creates the directory. Throws c10::Error if it cannot be created or
  /// already holds a run, and reprise::Error if config.json cannot be written.
  static RunDirectory create(const std::string& path,
                             const TrainConfig& config);

  /// Opens an existing run. Throws c10::Error if there is none, or if another
  /// process holds its lock.
  static RunDirectory open(const std::string& path);

  ~RunDirectory();
  RunDirectory(RunDirectory&&) noexcept;
  RunDirectory& operator=(RunDirectory&&) noexcept;

  const std::string& path() const { return path_; }
  /// Reads config.json. Throws reprise::Error if it cannot be read and
  /// c10::Error if it is malformed.
  TrainConfig config() const;
  /// Replaces config.json. Throws reprise::Error if it cannot be written.
  void set_config(const TrainConfig& config);
  std::string metrics_path() const { return path_ + "/metrics.jsonl"; }

  /// Writes a state, then removes all but the last `keep` states. Throws
  /// reprise::Error if the state cannot be written.
  void save(const RunState& state, const NamedTensors& tensors, int keep);

  /// A state that was read from disk.
  struct Saved {
    std::string path;
    RunState state;
    NamedTensors tensors;  ///< on the CPU
  };
  /// Returns the newest state that can be read; nullopt if there is none.
  /// Calls `warn` for each newer state that cannot be read. Throws c10::Error
  /// if memory runs out.
  std::optional<Saved> newest(
      const std::function<void(const std::string&)>& warn) const;

 private:
  RunDirectory(std::string path, int lock);
  std::string path_;
  int lock_ = -1;
};

/// Appends lines of JSON to a file.
class MetricsLog {
 public:
  /// Opens or creates the file and truncates it to `keep_bytes`: lines after
  /// the state that a run continues from will be written again. Throws
  /// reprise::Error if the file is shorter or cannot be written.
  MetricsLog(const std::string& path, int64_t keep_bytes);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  /// Appends `line` and a newline. If the line cannot be written, the file is
  /// unchanged and reprise::Error is thrown.
  void write(const std::string& line);
  /// Flushes written lines to disk. Errors are ignored.
  void sync();
  /// Length of the file.
  int64_t bytes() const;

 private:
  std::unique_ptr<detail::AppendLog> log_;
};

}  // namespace reprise
