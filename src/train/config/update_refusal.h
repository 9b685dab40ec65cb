#pragma once

#include <reprise/train/options.h>

#include <string>

namespace reprise::detail {

/// Returns why a training with these options cannot update its parameters during the
/// backward, whatever its micro-batch; empty if it can. Tested by
/// tests/train/step/backward_update_test.cpp.
std::string update_refusal(const TrainOptions& options);

/// Returns why a training with these options cannot keep the optimizer's state in host memory;
/// empty if it can. Tested by tests/train/step/host_state_training_test.cpp.
std::string state_refusal(const TrainOptions& options);

}  // namespace reprise::detail
