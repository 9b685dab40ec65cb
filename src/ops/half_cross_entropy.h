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
/// the rows of the hidden values and of their gradient. On CUDA the softmax and what
/// is around it are one kernel each way.
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

  /// What the backward needs of the forward.
  struct ForwardState {
    torch::Tensor picked;     ///< (N, 1): the targets' logarithms
    torch::Tensor log_total;  ///< (N) with kernels: of the sums of exponentials
    torch::Tensor scores;     ///< all of them, where they were one part
  };
  struct Result {
    torch::Tensor loss;   ///< sum, single precision
    torch::Tensor right;  ///< as linear_cross_entropy()'s
    ForwardState left;
  };
  Result forward(bool count_right) const;

  /// What is undefined is not wanted. `weight_sum` (V, D) and `bias_sum` (V), in
  /// single precision, are added to.
  struct Gradients {
    torch::Tensor hidden;  ///< (N, D), filled
    torch::Tensor weight_sum, bias_sum;
  };
  /// Writes over `left.scores`.
  void backward(const torch::Tensor& loss_gradient, const ForwardState& left,
                Gradients& gradients) const;

  /// Whether the kernels are there for tensors like these.
  static bool has_kernels(const torch::Tensor& hidden);

 private:
  void compute_forward(const torch::Tensor& scores, int64_t first,
                       int64_t count, Result& result) const;
  /// The gradient of the scores, but for a factor a row. May write over `scores`.
  torch::Tensor compute_backward(const torch::Tensor& scores, int64_t first,
                                 int64_t count, const ForwardState& left) const;
  torch::Tensor scores(int64_t first, int64_t count) const;
  torch::Tensor places(int64_t first, int64_t count) const;
};

}  // namespace reprise
