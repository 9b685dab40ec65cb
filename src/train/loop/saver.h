#pragma once

#include "train/loop/reporter.h"
#include "train/loop/run_clock.h"
#include "train/step/gradients.h"
#include "train/step/oom_retry.h"
#include "train/step/ranks.h"
#include "train/step/step_runner.h"
#include "train/step/train_setup.h"
#include "train/step/window_exchange.h"
#include "train/store/state_files.h"

#include <reprise/train/optimizer.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace reprise::detail {

/// Saves the state of a training to its run directory and restores it. Only
/// rank 0 has the directory. If the state is divided among ranks, each writes its part, or
/// rank 0 gathers them if another one does not see the directory. Tested by tests/train/loop/trainer_test.cpp and
/// tests/train/step/oom_retry_test.cpp.
class Saver {
 public:
  struct Parts {
    TrainSetup& setup;
    Ranks& ranks;
    WindowExchange& exchange;
    StepRunner& runner;
    Gradients& gradients;
    Optimizer& optimizer;
    OomRetry& retry;
    RunClock& clock;
    Reporter& reporter;
  };
  explicit Saver(const Parts& parts) : parts_(parts) {}

  /// Sets the directory, which is not owned; if it is null, nothing is saved.
  /// All ranks learn whether rank 0 has one.
  void start(RunDirectory* directory);

  /// A state on disk, whose tensors rank 0 reads for all.
  struct Found {
    RunState state;
    std::vector<std::pair<std::string, StateFiles::Shape>> tensors;
    std::optional<StateFiles> files;  ///< on rank 0
  };
  /// Returns the newest whole state on disk, on all ranks; see StateFiles::newest().
  std::optional<Found> newest();
  /// Restores everything except the position of the loader, and sets `state`
  /// and the number of samples of the current window.
  void restore(const Found& saved, RunState& state, int64_t& window_samples);

  /// Whether a save is due by the clock of this process.
  bool time_is_up() const;
  /// Saves the state, unless it is the one that was restored. A failure is only reported as
  /// a warning, because earlier states are intact and a later save may succeed.
  void save(RunState& state, int64_t window_samples);
  /// Whether the last attempt failed.
  bool failed() const { return failed_; }
  bool enabled() const { return enabled_; }

  /// Writes the sizes chosen by a plan to the run directory.
  void save_config();

 private:
  /// Whether all ranks can write to the directory of rank 0.
  bool directory_is_shared();
  NamedTensors tensors(const RunState& state, int64_t window_samples,
                       const NamedTensors& parameters,
                       const NamedTensors& of_optimizer);
  /// What this rank writes; `save` is the same on all ranks.
  StatePart part(const RunState& state, int64_t window_samples,
                 const std::string& save);
  /// Collective. Writes the parts of all ranks but 0; returns whether they could.
  bool save_other_parts(const RunState& state, int64_t window_samples,
                        const std::string& save);
  void write(RunState& state, const std::function<StatePart()>& collect,
             int ranks);
  torch::Tensor read(const Found& saved, size_t index);
  void restore_window(const std::map<std::string, torch::Tensor>& tensors,
                      RunState& state, int64_t& window_samples);

  Parts parts_;
  RunDirectory* directory_ = nullptr;
  bool enabled_ = false;  // rank 0 has a directory
  std::string
      shared_path_;  // of it, if the state is divided; empty: rank 0 gathers it
  bool failed_ = false;
  std::string data_;  // fingerprint of the training data, on rank 0
  std::optional<RunState> restored_;  // the last one
  RunClock::Clock::time_point last_ = RunClock::Clock::now();
};

}  // namespace reprise::detail
