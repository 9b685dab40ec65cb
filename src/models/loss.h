#pragma once

#include <reprise/models/model.h>

#include <torch/nn/pimpl.h>

namespace reprise::detail {

/// Cross entropy of scores (N, classes, …), in float32. A module without parameters, so
/// that it switches between training and evaluation with the model.
/// Tested by tests/models/values_test.cpp.
class LossImpl : public torch::nn::Module {
 public:
  explicit LossImpl(Task task) : task_(task) {}

  /// Returns the outputs of a chain: {sum of losses}, in evaluation {sum of losses, number
  /// of correct predictions}.
  Tensors forward(const torch::Tensor& scores, const torch::Tensor& targets);

  /// forward(hidden · weightᵀ, targets) with ops::linear_cross_entropy(), which never stores
  /// all scores. hidden (N, D), weight (classes, D), targets (N). `recompute`: the backward
  /// computes the scores again; otherwise the operator decides.
  Tensors forward_in_chunks(const torch::Tensor& hidden,
                            const torch::Tensor& weight,
                            const torch::Tensor& targets, bool recompute);

 private:
  Task task_;
};
TORCH_MODULE(Loss);

}  // namespace reprise::detail
