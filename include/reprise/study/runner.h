#pragma once

#include <reprise/base/enum_text.h>
#include <reprise/study/study_file.h>
#include <reprise/train/planning.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace reprise {

/// How a run ended.
enum class RunStatus {
  kDone,    ///< has figures
  kOom,     ///< ran out of memory
  kFailed,  ///< any other error, or took too long
  kSkipped  ///< was not started: the predicted peak is too large
};

template <>
struct EnumText<RunStatus> {
  static constexpr std::array<std::string_view, 4> names{"done", "oom",
                                                         "failed", "skipped"};
};

struct StudyCounts {
  int done = 0, oom = 0, failed = 0, skipped = 0;
  int total() const { return done + oom + failed + skipped; }
};

/// Receives the progress of a study, on the thread that calls run_study().
class StudyListener {
 public:
  virtual ~StudyListener() = default;

  struct Run {
    int number = 0, total = 0;  ///< number starts at 1
    std::string description;
    double remaining_s = 0;  ///< estimate for the study, including this run
  };
  virtual void run_started(const Run&) {}

  struct RunResult {
    Run run;
    RunStatus status = RunStatus::kFailed;
    std::string reason;  ///< empty if done
    double wall_s = 0;
    int64_t peak_bytes = 0, kept_bytes = 0;
    double samples_per_s = 0;
    /// Reasons why the measured time is unreliable; see TrainSummary::warnings.
    std::vector<std::string> warnings{};
  };
  virtual void run_ended(const RunResult&) {}
};

struct StudyOptions {
  std::string directory;  ///< of the results
  /// Path of the reprise command, called as `train --model ... --format json`.
  std::string program;
  /// Flags of every run besides its own, such as {"--plugin", "libmine.so"}.
  std::vector<std::string> flags{};
  std::string device = "cpu";  ///< for runs without a device
  std::string device_json;     ///< as documented in docs/results.md
  std::string device_name;     ///< part of the run ids
  int64_t device_memory = 0;   ///< bytes available to a run; 0: unknown
  std::string version;         ///< version of the program
  bool resume = false;         ///< continue a study that has results
  bool retry = false;          ///< repeat failed runs
  int part = 1, parts = 1;     ///< run only part `part` of `parts`
  double timeout_s = 1800;     ///< per run, if the study has no timeout
  /// Bytes per process on the CPU; 0: none. Passed in the environment variable
  /// REPRISE_MEMORY_LIMIT, since the program applies it after it has loaded its libraries.
  int64_t memory_limit = 0;
  std::function<bool()> stop{};  ///< returns true to stop as soon as possible
  StudyListener* listener = nullptr;  ///< not owned; may be null
};

struct StudyOutcome {
  StudyCounts completed;  ///< runs of this call
  StudyCounts existing;   ///< runs that already had a result
  int with_warnings = 0;  ///< completed runs with warnings
  bool stopped = false;
};

/// The runs of this part that have no result yet, as indices into `study.runs`.
/// Throws c10::Error if the directory has results and `resume` is not set.
std::vector<size_t> runs_to_do(const Study& study, const StudyOptions& options);

/// Runs the study. Every training runs in a process of its own, so that peak
/// memory is measured per run, and out-of-memory errors and crashes are recorded
/// as results. Appends each result to the results file when the run ends.
///
/// `predictions` is empty or has one entry per run. A run whose predicted peak
/// exceeds `device_memory` by more than a quarter is skipped. Throws c10::Error
/// if the directory has results and `resume` is not set, or if it cannot be
/// written.
StudyOutcome run_study(
    const Study& study, const StudyOptions& options,
    const std::vector<std::optional<TrainingPrediction>>& predictions = {});

/// The command line of a run: the program, "train" and its flags.
std::vector<std::string> command_of(const StudyRun& run,
                                    const StudyOptions& options);

/// Estimated duration of a run in seconds, including start-up.
double expected_seconds(const StudyRun& run,
                        const std::optional<TrainingPrediction>& prediction);

namespace detail {
class AppendLog;
}

/// Returns all objects in the results of `paths` (study directories or .jsonl files),
/// each as the text of its line: studies first, then runs in the order in which they were
/// written. If runs have the same id, the last one counts. An incomplete last line is
/// ignored. Throws reprise::Error if a file cannot be read, and c10::Error if a path does
/// not exist, a directory has no results.jsonl or a line is not a result (with its
/// number).
std::vector<std::string> read_results(const std::vector<std::string>& paths);

/// Appends lines to a results.jsonl. Each line is on disk before append() returns, or not
/// in the file at all. One process at a time may have the file open.
class ResultsFile {
 public:
  /// Creates the directory and the file if they do not exist, and removes an incomplete
  /// last line. Throws c10::Error if another process has the file open, and
  /// reprise::Error if it cannot be written.
  explicit ResultsFile(const std::string& directory);
  ~ResultsFile();
  ResultsFile(const ResultsFile&) = delete;
  ResultsFile& operator=(const ResultsFile&) = delete;

  const std::string& path() const;

  /// `json`: one object, without a newline. Throws reprise::Error if it cannot be
  /// written.
  void append(const std::string& json);

 private:
  std::unique_ptr<detail::AppendLog> log_;
};

}  // namespace reprise
