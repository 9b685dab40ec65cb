#pragma once

#include "train/step/ranks.h"
#include "train/step/train_setup.h"

#include <functional>
#include <string>

namespace reprise::detail {

/// Replaces kAuto in the options `layout` and `autotune` of `setup`, and places the model
/// accordingly.
///
/// On CUDA, if the model has convolutions and the training is long enough to pay for it, the
/// micro-step is timed with each setting: rank 0 measures and the other ranks adopt its
/// choice. Otherwise a rule decides, so that short trainings need not measure: channels-last
/// for half precision, planes for fp32, no autotuning. On the CPU the layout is always
/// planes, because a choice by measured time would make results differ between runs.
///
/// `measure` false: use the rule. `say` gets one line per measurement; may be empty. The
/// state of the model is restored. Tested by tests/train/budget/device_settings_test.cpp.
void settle_device_settings(TrainSetup& setup, Ranks& ranks, bool measure,
                            const std::function<void(const std::string&)>& say);

/// Number of micro-batches of a training and rank; the largest integer if the options give
/// no end.
int64_t micro_batches_of(const TrainSetup& setup);

}  // namespace reprise::detail
