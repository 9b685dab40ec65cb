#pragma once

#include <reprise/models/model.h>

#include <torch/nn/pimpl.h>

namespace reprise::detail {

/// Cross entropy of scores (N, classes, ...), in single precision. A module so
/// that it follows the model into evaluation; it has no parameters.
class LossImpl : public torch::nn::Module {
 public:
  explicit LossImpl(Task task) : task_(task) {}

  /// The last tensors of a chain: {sum of losses}, in evaluation {sum of
  /// losses, number of right predictions}.
  Tensors forward(const torch::Tensor& scores, const torch::Tensor& targets);

  /// forward(hidden · weightᵀ, targets) without the scores ever being whole; see
  /// linear_cross_entropy(). hidden (N, D), weight (classes, D), targets (N).
  Tensors forward_in_chunks(const torch::Tensor& hidden,
                            const torch::Tensor& weight,
                            const torch::Tensor& targets);

 private:
  Task task_;
};
TORCH_MODULE(Loss);

}  // namespace reprise::detail
