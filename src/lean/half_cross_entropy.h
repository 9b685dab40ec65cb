#pragma once

#include <torch/types.h>

#include <cstdint>

namespace reprise {

/// linear_cross_entropy() in half precision with few passes over the scores.
///
/// The weight has rows of zeros up to a round number, and the scores of these are
/// minus infinity by the bias: no class to the softmax, and nothing in any gradient.
/// So whole, round rows of scores go from one product to the next. In the backward
/// the softmax itself, rounded to half precision, is the gradient of the scores
/// but for the target's class and a factor a row. The class is set to its exact
/// value, which the forward leaves behind; the factor is applied to what is small:
/// the rows of the hidden values and of their gradient.
struct HalfCrossEntropy {
  torch::Tensor hidden;   ///< (N, D), half precision
  torch::Tensor weight;   ///< (V', D) likewise, V' ≥ V, zeros from V on
  torch::Tensor bias;     ///< (V') likewise, or undefined where V' is V
  torch::Tensor targets;  ///< (N)
  int64_t columns = 0;    ///< V
  int64_t ignore_index = -100;
  int64_t rows_at_a_time = 1;

  /// A bias of `columns` values or none, with minus infinity up to `padded`;
  /// undefined where that is nothing at all.
  static torch::Tensor padded_bias(const torch::Tensor& bias, int64_t columns,
                                   int64_t padded,
                                   const torch::TensorOptions& options);

  struct Result {
    torch::Tensor loss;   ///< sum, single precision
    torch::Tensor right;  ///< as linear_cross_entropy()'s
    torch::Tensor
        picked;  ///< (N, 1): the targets' logarithms, for the backward
  };
  Result forward(bool count_right) const;

  /// What is undefined is not wanted. `weight_sum` (V, D) and `bias_sum` (V), in
  /// single precision, are added to.
  struct Gradients {
    torch::Tensor hidden;  ///< (N, D), filled
    torch::Tensor weight_sum, bias_sum;
  };
  void backward(const torch::Tensor& loss_gradient, const torch::Tensor& picked,
                Gradients& gradients) const;

 private:
  torch::Tensor scores(int64_t first, int64_t count) const;
  torch::Tensor places(int64_t first, int64_t count) const;
};

}  // namespace reprise
