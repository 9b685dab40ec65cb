#pragma once

#include <torch/types.h>

#include <array>
#include <cstdint>
#include <vector>

/// Adam's update with our kernel. Tested by tests/train/optim/optimizer_test.cpp.
namespace reprise::detail {

struct AdamSettings {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0;
  /// AdamW if true; else weight decay is added to the gradient.
  bool decoupled = true;
};

/// A parameter with its state. `count`: number of its update, counted from 1.
struct AdamParameter {
  torch::Tensor parameter, gradient, mean, square;
  int64_t count = 1;
  /// The results of adam_step_values() in device memory, to be used instead of those of
  /// `count` and of the settings when the kernel runs; null: none.
  const float* step_values = nullptr;
};

/// Values of update number `count` that the kernel may read from device memory.
std::array<double, 3> adam_step_values(const AdamSettings& settings,
                                       int64_t count);

/// Whether adam_update() supports the parameter: float32 on a CUDA device, all tensors
/// dense with equal strides and aligned to 16 bytes.
bool adam_update_eligible(const AdamParameter& parameter);

/// Updates the parameters, which must be eligible and on one device, in one pass over
/// memory. The same pass writes the copies that WeightCopies holds of them, which are up to
/// date afterwards. Allocates nothing.
void adam_update(const std::vector<AdamParameter>& parameters,
                 const AdamSettings& settings);

/// Marks `parameters`, and their copies that adam_update() writes, as changed by it: after
/// the replay of a CUDA graph, which changes them without a call.
void mark_adam_updated(const std::vector<torch::Tensor>& parameters);

}  // namespace reprise::detail
