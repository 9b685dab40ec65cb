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

/// How far a training has come, besides its tensors.
struct RunState {
  int64_t step = 0;        ///< updates done
  int64_t micro = 0;       ///< micro-batches done of the window that is open
  double total_count = 0;  ///< of that window
  double done_count = 0;
  LoaderPosition position{};
  GradScaler::State scaler{};
  int64_t samples = 0;          ///< trained on in all
  double train_s = 0;           ///< seconds trained in all
  int64_t metrics_bytes = 0;    ///< length of metrics.jsonl at this moment
  bool evaluation_due = false;  ///< stopped in an evaluation: repeat it
  bool finished = false;        ///< the training has reached its end
};

/// As a state's file has it, and back. Throws where the text is no such state.
std::string to_text(const RunState& state);
RunState run_state_from_text(const std::string& text);

/// A run on disk:
///
///     config.json                       as resolved
///     metrics.jsonl                     a line an update or evaluation
///     state-STEP-MICRO.safetensors      the last few states, each whole
///
/// Every file but the metrics is written atomically; a state is there whole or
/// not at all, whenever the process dies. One process at a time: a lock on the
/// directory, which the system drops with the process.
class RunDirectory {
 public:
  /// Creates the directory. Throws c10::Error if it cannot be created or already holds a
  /// run, and reprise::Error if config.json cannot be written.
  static RunDirectory create(const std::string& path,
                             const TrainConfig& config);

  /// Throws c10::Error if there is no run, or another process is training in it.
  static RunDirectory open(const std::string& path);

  ~RunDirectory();
  RunDirectory(RunDirectory&&) noexcept;
  RunDirectory& operator=(RunDirectory&&) noexcept;

  const std::string& path() const { return path_; }
  TrainConfig config() const;
  void set_config(const TrainConfig& config);
  std::string metrics_path() const { return path_ + "/metrics.jsonl"; }

  /// Writes a state, then removes all but the last `keep`. Throws reprise::Error if the
  /// state cannot be written.
  void save(const RunState& state, const NamedTensors& tensors, int keep);

  struct Saved {
    std::string path;
    RunState state;
    NamedTensors tensors;  ///< on the CPU
  };
  /// The newest state that can be read; those that cannot are named to `warn`
  /// and passed over. Throws c10::Error where memory runs out.
  std::optional<Saved> newest(
      const std::function<void(const std::string&)>& warn) const;

 private:
  RunDirectory(std::string path, int lock);
  std::string path_;
  int lock_ = -1;
};

/// Appends lines of JSON to a file. Opening truncates it to `keep_bytes`: lines later than
/// the state that a run continues from will be written again. Throws reprise::Error if
/// the file is shorter or cannot be written; a line is then not in the file.
class MetricsLog {
 public:
  MetricsLog(const std::string& path, int64_t keep_bytes);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  void write(const std::string& line);
  /// Forces what was written to disk.
  void sync();
  int64_t bytes() const;

 private:
  std::unique_ptr<detail::AppendLog> log_;
};

}  // namespace reprise
