#pragma once

#include <string>

namespace reprise {

/// Directory of a run:
///
///     config.json                       configuration, as a JSON object
///     metrics.jsonl                     one line per update or evaluation
///     state-STEP-MICRO.safetensors      the most recent states; if they are divided among
///                                       ranks, with a file .part-RANK for each other rank
///     summary.json                      written at the end
///     state-….safetensors.broken        states that were damaged and set aside
///
/// All files except the metrics are written atomically, so that a state is
/// either complete or absent even if the process is killed or the power fails. States
/// have checksums, and one that does not fit them is never read. The directory is
/// locked by one process at a time; the lock ends with the process.
class RunDirectory {
 public:
  /// Creates the directory with `config`, a JSON object such as that of
  /// to_json(TrainOptions). Throws c10::Error if the directory already
  /// holds a run, and reprise::Error if it or config.json cannot be written.
  static RunDirectory create(const std::string& path,
                             const std::string& config);

  /// Opens an existing run. Throws c10::Error if there is none, or if another
  /// process holds its lock.
  static RunDirectory open(const std::string& path);

  ~RunDirectory();
  RunDirectory(RunDirectory&&) noexcept;
  RunDirectory& operator=(RunDirectory&&) noexcept;

  const std::string& path() const { return path_; }
  std::string metrics_path() const { return path_ + "/metrics.jsonl"; }

  /// Reads config.json. Throws reprise::Error if it cannot be read.
  std::string config() const;
  /// Replaces config.json. Throws reprise::Error if it cannot be written.
  void set_config(const std::string& config);
  /// Replaces the values of config.json that the JSON object `values` has, and
  /// keeps all others. Throws reprise::Error if a file cannot be read or written,
  /// and c10::Error if it is malformed.
  void update_config(const std::string& values);

 private:
  RunDirectory(std::string path, int lock);
  std::string path_;
  int lock_ = -1;
};

}  // namespace reprise
