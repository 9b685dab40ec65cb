#pragma once

#include <reprise/train/trainer.h>

#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>

namespace reprise {

/// What surrounds a training: its directory, its ranks and its listener.
struct RunOptions {
  /// Directory of a new run; empty: nothing is saved.
  std::string out{};
  /// Directory of a run to continue; empty: start a new one. Not with `out`.
  std::string resume{};
  /// Values that replace those of the run to continue, by field: {"steps", "200"}.
  /// A run that had no budget is planned if it gets one and "recompute" is not given.
  std::map<std::string, std::string> changes{};

  PlanningOptions planning{};  ///< only rank 0 plans and reports progress
  /// See TrainRun.
  std::function<bool()> stop{};
  std::string export_path{};

  /// Connection of the ranks; see RankGroupOptions.
  std::string backend{};
  double rank_timeout_s = 60;

  /// Called on rank 0 with the final options, before the model is built.
  std::function<void(const TrainOptions&)> configured{};
  /// Returns the listener, which is deleted when the training has ended. `log` is
  /// standard error on rank 0, and rank-N.log in the run directory on rank N.
  std::function<std::unique_ptr<TrainListener>(std::FILE* log)> listener{};
};

/// Result of run_training().
struct RunResult {
  TrainResult training;
  std::string directory;  ///< of the run; empty: nothing was saved
  int rank = 0;
};

/// Trains as a program does: joins the ranks if a launcher has started this process
/// (rank_info_from_environment()), creates or continues a run directory, trains, and
/// writes summary.json. On CUDA, each rank gets its own device if there are enough.
///
/// Nothing is written until the training has been planned and can begin. An error on
/// one rank is reported to all of them. `inputs` is called with the final options and
/// returns the model, in host memory, and the data. With `run.resume`, the options are
/// those of the saved run; `training` decides only the groups of parameters, which are not
/// saved, and the device of ranks.
///
/// Throws c10::Error or reprise::Error as TrainOptions::resolve(), RunDirectory and
/// Trainer do; also if `run.out` holds a run or is not writable, if `run.resume` was
/// saved by another training, or if `run.changes` has an unknown field.
RunResult run_training(
    const TrainOptions& training,
    const std::function<TrainInputs(const TrainOptions&)>& inputs,
    const RunOptions& run = {});

/// Overload for the built-in model and data that `config` names.
RunResult run_training(const TrainConfig& config, const RunOptions& run = {});

}  // namespace reprise
