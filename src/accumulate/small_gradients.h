#pragma once

#include <torch/types.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace reprise {

/// Adds the gradients of many small parameters in one call of the device.
///
/// Autograd adds each parameter's gradient to what is there with a kernel of its own,
/// which for biases and norms takes longer to start than to run. While this lives,
/// their gradients so far are aside, and the backward leaves the new ones behind as
/// they are; add() puts the sums in place. The same additions, so the same bits.
///
///     const auto parameters = smallest_of(model->parameters());
///     …
///     SmallGradients small(parameters);
///     loss.backward();
///     small.add();
///
/// Costs their memory a second time from their backward to add().
class SmallGradients {
 public:
  /// Takes aside the gradients of `parameters`, but not where a copy (WeightCopies)
  /// makes its layer add to them.
  explicit SmallGradients(const std::vector<torch::Tensor>& parameters);
  /// Without add(), the gradients are what they were.
  ~SmallGradients();
  SmallGradients(const SmallGradients&) = delete;
  SmallGradients& operator=(const SmallGradients&) = delete;

  /// Once, after the backward.
  void add();

 private:
  std::vector<std::pair<torch::Tensor, torch::Tensor>> aside_;
};

/// The smallest of `parameters`, as many as have `share` of all their values together,
/// and none with more than 65,536.
std::vector<torch::Tensor> smallest_of(std::vector<torch::Tensor> parameters,
                                       double share = 1.0 / 64);

}  // namespace reprise
