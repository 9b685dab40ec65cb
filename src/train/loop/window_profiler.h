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

/// Profiles one window of a training: the second, since from then on the optimizer has its
/// state, or the first if there is no other. It finds the moment of the peak and what the
/// memory is used for then.
class WindowProfiler {
 public:
  /// Keeps references to all of them.
  WindowProfiler(const TrainSetup& setup, const BatchSource& source,
                 StepRunner& runner, const Optimizer& optimizer);

  /// A window begins, after `windows` of this run; `left` are still to come, this one
  /// included.
  void begin_window(int64_t windows, int64_t left);
  /// The profile of the current window; null if it is not profiled.
  WindowProfile* active() { return active_ ? &*profile_ : nullptr; }
  /// Whether a window has been profiled, or is being profiled.
  bool seen() const { return profile_.has_value(); }
  /// The window ended. A window without an update shows too little and is discarded.
  void end_window(bool updated);
  /// The window was dropped.
  void drop_window();
  /// Another schedule from now on.
  void reset();

  void set_denormal_share(double share) { denormal_share_ = share; }
  double denormal_share() const { return denormal_share_; }

  /// Adds the findings to `summary`.
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
