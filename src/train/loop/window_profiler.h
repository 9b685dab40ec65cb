#pragma once

#include "train/profile/window_profile.h"
#include "train/step/batch_source.h"
#include "train/step/step_runner.h"
#include "train/step/train_setup.h"

#include <reprise/memory/categories.h>
#include <reprise/memory/kept.h>
#include <reprise/train/optimizer.h>
#include <reprise/train/summary.h>

#include <optional>

namespace reprise::detail {

/// Profiles one window of a training to find its peak and the memory by
/// category at the peak. This is the second window, because the optimizer has
/// its state from then on, or the first if there is no other. Tested by
/// tests/train/loop/trainer_test.cpp.
class WindowProfiler {
 public:
  /// Keeps references to all arguments.
  WindowProfiler(const TrainSetup& setup, const BatchSource& source,
                 StepRunner& runner, const Optimizer& optimizer);

  /// Called when a window begins. `windows` is the number of windows done in
  /// this run, `left` the number still to come, including this one. `separate_graphs`: give
  /// each stage an autograd graph, for the peak of each; this may need more memory.
  void begin_window(int64_t windows, int64_t left, bool separate_graphs);
  /// Returns the profile of the current window; null if it is not profiled.
  WindowProfile* active() { return active_ ? &*profile_ : nullptr; }
  /// Whether a window has been profiled, or is being profiled.
  bool seen() const { return profile_.has_value(); }
  /// Called when a window ends. The profile of a window without an update is
  /// incomplete and is discarded.
  void end_window(bool updated);
  /// Called when a window is dropped; discards its profile.
  void drop_window();
  /// Discards the profile because the schedule changes.
  void reset();

  void set_denormal_share(double share) { denormal_share_ = share; }
  double denormal_share() const { return denormal_share_; }

  /// Writes the results to `summary`.
  void describe(TrainSummary& summary) const;

 private:
  const TrainSetup& setup_;
  StepRunner& runner_;
  KeptMeter kept_;
  MemoryLedger ledger_;
  std::optional<WindowProfile> profile_;
  bool active_ = false;
  double denormal_share_ = 0;
};

}  // namespace reprise::detail
