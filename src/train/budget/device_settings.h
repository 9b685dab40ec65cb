#pragma once

#include "train/step/ranks.h"
#include "train/step/train_setup.h"

#include <functional>
#include <string>

namespace reprise::detail {

struct SettleOptions {
  /// Time the micro-step if the training is long enough to pay for it; otherwise, and if
  /// false, a rule decides.
  bool measure = true;
  /// Memory budget in bytes; 0: none.
  int64_t memory = 0;
  /// Gets one line per measurement; may be empty.
  std::function<void(const std::string&)> say{};
};

/// Replaces kAuto in the options `layout` and `autotune` of `setup`, and places the model
/// accordingly.
///
/// On CUDA, if the model has convolutions, the micro-step is timed with each setting: rank 0
/// measures and the other ranks adopt its choice. Within a memory budget cuDNN's algorithms
/// are not tried, because the memory of the trials is not known in advance. The rule for
/// short trainings: channels-last for half precision, planes for fp32, no autotuning. On the
/// CPU the layout is always planes, because a choice by measured time would make results
/// differ between runs.
///
/// The state of the model is restored. Tested by
/// tests/train/budget/device_settings_test.cpp.
void settle_device_settings(TrainSetup& setup, Ranks& ranks,
                            const SettleOptions& options);

/// Number of micro-batches of a training and rank; the largest integer if the options give
/// no end.
int64_t micro_batches_of(const TrainSetup& setup);

}  // namespace reprise::detail
