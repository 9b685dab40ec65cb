#pragma once

#include "train/loop/reporter.h"
#include "train/loop/run_clock.h"
#include "train/step/gradients.h"
#include "train/step/oom_retry.h"
#include "train/step/ranks.h"
#include "train/step/step_runner.h"
#include "train/step/train_setup.h"
#include "train/step/window_exchange.h"

#include <reprise/train/optimizer.h>
#include <reprise/train/run_directory.h>

#include <cstdint>
#include <optional>

namespace reprise::detail {

/// Saves the state of a training to its run directory and restores it. Rank 0 has the
/// directory; with a sharded optimizer all ranks take part in a save.
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
  explicit Saver(Parts parts) : parts_(parts) {}

  /// `directory` null: nothing is saved. All ranks learn whether rank 0 has one.
  void start(RunDirectory* directory);

  /// Newest state on disk that can be read, on all ranks.
  std::optional<RunDirectory::Saved> newest();
  /// Restores `saved` everywhere but in the loader; `window_samples`: of its open window.
  void restore(const RunDirectory::Saved& saved, RunState& state,
               int64_t& window_samples);

  /// Whether the time between saves has passed on this process's clock.
  bool time_is_up() const;
  /// Saves, and reports a failure as a warning: the last good state is whole, and a later
  /// attempt may find room on the disk again.
  void save(RunState& state, int64_t window_samples);
  /// Whether the last attempt failed.
  bool failed() const { return failed_; }
  bool enabled() const { return enabled_; }

  /// Writes the sizes that a plan has decided to the run directory.
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
