#pragma once

#include "train/loop/reporter.h"
#include "train/loop/run_clock.h"
#include "train/step/gradients.h"
#include "train/step/oom_retry.h"
#include "train/step/ranks.h"
#include "train/step/step_runner.h"
#include "train/step/train_setup.h"
#include "train/step/window_exchange.h"
#include "train/store/run_state.h"

#include <reprise/train/optimizer.h>

#include <cstdint>
#include <optional>

namespace reprise::detail {

/// Saves the state of a training to its run directory and restores it. Only
/// rank 0 has the directory; with a sharded optimizer all ranks take part in a
/// save. Tested by tests/train/loop/trainer_test.cpp and
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

  /// Returns the newest state on disk that can be read, on all ranks.
  std::optional<SavedState> newest();
  /// Restores everything except the position of the loader, and sets `state`
  /// and the number of samples of the current window.
  void restore(const SavedState& saved, RunState& state,
               int64_t& window_samples);

  /// Whether a save is due by the clock of this process.
  bool time_is_up() const;
  /// Saves the state. A failure is only reported as a warning, because earlier
  /// states are intact and a later save may succeed.
  void save(RunState& state, int64_t window_samples);
  /// Whether the last attempt failed.
  bool failed() const { return failed_; }
  bool enabled() const { return enabled_; }

  /// Writes the sizes chosen by a plan to the run directory.
  void save_config();

 private:
  NamedTensors tensors(const RunState& state, int64_t window_samples);

  Parts parts_;
  RunDirectory* directory_ = nullptr;
  bool enabled_ = false;  // rank 0 has a directory
  bool failed_ = false;
  RunClock::Clock::time_point last_ = RunClock::Clock::now();
};

}  // namespace reprise::detail
