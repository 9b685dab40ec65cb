#pragma once

#include <reprise/study/study_file.h>
#include <reprise/train/prediction.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

/// Runs a study: each training in a process of its own, so that its peak is its
/// own, and running out of memory or a crash is a result like any other.
namespace reprise {

struct StudyCounts {
  int done = 0, oom = 0, failed = 0, skipped = 0;
  int total() const { return done + oom + failed + skipped; }
};

/// Told what happens, on the thread of run_study().
class StudyListener {
 public:
  virtual ~StudyListener() = default;

  struct Run {
    int number = 0, total = 0;  ///< from 1
    std::string words;
    double left_s = 0;  ///< of the whole study, this run included
  };
  virtual void run_started(const Run&) {}

  struct Ended {
    Run run;
    std::string status;  ///< done, oom, failed, skipped
    std::string reason;
    double wall_s = 0;
    int64_t peak_bytes = 0, kept_bytes = 0;
    double samples_per_s = 0;
    /// What makes its time doubtful: see TrainSummary::warnings.
    std::vector<std::string> warnings{};
  };
  virtual void run_ended(const Ended&) {}
};

struct StudyOptions {
  std::string directory;
  /// The program to run, found once; called as `train --model … --format json`.
  std::string program;
  std::string device = "cpu";    ///< for runs that name none
  std::string device_json;       ///< as docs/results.md describes it
  std::string device_name;       ///< that makes ids
  int64_t device_memory = 0;     ///< bytes that a run could have; 0: unknown
  std::string version;           ///< of the program
  bool resume = false;           ///< go on where results are
  bool retry = false;            ///< run again what failed
  int part = 1, parts = 1;       ///< of the runs, shared out among machines
  double timeout_s = 1800;       ///< of a run, where the study gives none
  int64_t memory_limit = 0;      ///< of a run's process on the CPU; 0: any
  std::function<bool()> stop{};  ///< true: end as soon as may be
  StudyListener* listener = nullptr;
};

struct StudyOutcome {
  StudyCounts now, before;  ///< before: found in the results
  int doubtful = 0;         ///< runs of now whose figures have warnings
  bool stopped = false;
};

/// The runs that this part has and that have no result yet, as indices into
/// `study.runs`. Reads the results where there are some.
std::vector<size_t> runs_to_do(const Study& study, const StudyOptions& options);

/// Runs what is to be done and appends each result as it comes. `predictions` as
/// study.runs, or empty; a run that is predicted to need a quarter more than
/// `device_memory` is skipped with that reason. Throws c10::Error if the directory has
/// results and `resume` is not set, or cannot be created; reprise::Error if the results
/// cannot be written or the program cannot be started.
StudyOutcome run_study(
    const Study& study, const StudyOptions& options,
    const std::vector<std::optional<TrainingPrediction>>& predictions = {});

/// The command of a run: program, "train" and flags.
std::vector<std::string> command_of(const StudyRun& run,
                                    const StudyOptions& options);

/// Seconds that a run takes by its flags and a prediction, start-up included.
double expected_seconds(const StudyRun& run,
                        const std::optional<TrainingPrediction>& prediction);

}  // namespace reprise
