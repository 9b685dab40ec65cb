#pragma once

#include <reprise/plan/modes.h>
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

/// Returns why a training with these options cannot keep its parameters in host memory; empty
/// if it can. Tested by tests/train/step/host_parameters_training_test.cpp.
std::string parameters_refusal(const TrainOptions& options);

/// Returns why a training with these options cannot have GradientSums::kBf16; empty if it can.
/// Tested by tests/train/step/half_gradients_training_test.cpp.
std::string gradients_refusal(const TrainOptions& options);

/// Whether the last micro-batch of a window updates the parameters in its backward, however
/// many there are.
inline bool updates_in_last(const TrainOptions& options) {
  return options.state == StatePlace::kHostAll ||
         options.gradients == GradientSums::kBf16;
}

/// Whether the optimizer's state is in host memory.
inline bool state_on_host(StatePlace place) {
  return place == StatePlace::kHost || place == StatePlace::kHostAll;
}

}  // namespace reprise::detail
