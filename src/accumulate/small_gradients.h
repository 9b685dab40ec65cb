#pragma once

#include <torch/types.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace reprise {

/// Accumulates the gradients of many small parameters with one foreach
/// operation.
///
/// Autograd adds each parameter's gradient to `.grad` with a separate kernel,
/// which for biases and norms takes longer to launch than to run. During the
/// lifetime of this object, the gradients accumulated so far are set aside and
/// the backward pass leaves the new ones in `.grad`; add() then writes the
/// sums. The additions are the same, so results are bit-identical.
///
///     const auto parameters = smallest_parameters(model->parameters());
///     …
///     SmallGradients small(parameters);
///     loss.backward();
///     small.add();
///
/// Needs memory for a second copy of these gradients from their backward to
/// add().
class SmallGradients {
 public:
  /// Sets aside the gradients of `parameters`, except of those with a weight
  /// copy (WeightCopies), whose layers accumulate into `.grad` themselves.
  explicit SmallGradients(const std::vector<torch::Tensor>& parameters);
  /// If add() was not called, restores the gradients that were set aside.
  ~SmallGradients();
  SmallGradients(const SmallGradients&) = delete;
  SmallGradients& operator=(const SmallGradients&) = delete;

  /// Adds the new gradients to those set aside. Call once, after the backward
  /// pass.
  void add();

 private:
  std::vector<std::pair<torch::Tensor, torch::Tensor>> aside_;
};

/// Returns the smallest of `parameters` that together hold at most the fraction
/// `share` of all elements. Parameters of more than 65,536 elements are never
/// included.
std::vector<torch::Tensor> smallest_parameters(
    std::vector<torch::Tensor> parameters, double share = 1.0 / 64);

}  // namespace reprise
