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
/// This holds for parameters whose gradients autograd adds. Operators that add
/// to `.grad` themselves (see WeightCopies) must find the sum there, so their
/// parameters must be left out:
///
///     const auto parameters = without(
///         smallest_parameters(model->parameters()), copies.weights());
///     …
///     SmallGradients small(parameters);
///     loss.backward();
///     small.add();
///
/// Needs memory for a second copy of these gradients from their backward to
/// add().
class SmallGradients {
 public:
  /// Sets aside the gradients of `parameters`, except sparse ones.
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

/// Returns `parameters` without those in `excluded`, in the same order.
std::vector<torch::Tensor> without(std::vector<torch::Tensor> parameters,
                                   const std::vector<torch::Tensor>& excluded);

}  // namespace reprise
