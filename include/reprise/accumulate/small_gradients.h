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
///     SmallGradients small(parameters);
///     loss.backward();
///     small.add();
class SmallGradients {
 public:
  /// Takes aside the gradients of those of `parameters` with at most `most` values.
  explicit SmallGradients(const std::vector<torch::Tensor>& parameters,
                          int64_t most = int64_t{1} << 16);
  /// Without add(), the gradients are what they were.
  ~SmallGradients();
  SmallGradients(const SmallGradients&) = delete;
  SmallGradients& operator=(const SmallGradients&) = delete;

  /// Once, after the backward.
  void add();

 private:
  std::vector<std::pair<torch::Tensor, torch::Tensor>> aside_;
};

}  // namespace reprise
