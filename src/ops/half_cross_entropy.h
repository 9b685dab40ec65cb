#pragma once

#include "ops/chunked_cross_entropy.h"

#include <torch/types.h>

#include <cstdint>

namespace reprise::detail {

/// ops::linear_cross_entropy() in half precision, by rows, with few passes over the scores.
///
/// The weight is padded with rows of zeros, and the bias with minus infinity: the padding
/// has softmax 0 and contributes nothing to any gradient, so that whole padded rows of
/// scores go from one matrix product to the next. In the backward the softmax itself,
/// rounded to half precision, is the gradient of the scores up to the target's class and a
/// factor per row. The target's class is set to its exact value, which the forward saves.
/// The factor is applied to small tensors: the rows of `hidden` and of its gradient. On
/// CUDA the softmax and what surrounds it are one kernel each way.
///
/// The loss is a sum, so its gradients are those for a loss gradient of 1 times the actual
/// one. forward() can compute the former while it has the scores, so that no backward needs
/// the scores again.
class HalfCrossEntropy {
 public:
  /// Requires a half-precision settings.gemm_type and a float32 loss.
  HalfCrossEntropy(const CrossEntropyInputs& inputs,
                   const CrossEntropySettings& settings);

  /// What the backward needs from the forward.
  struct ForwardState {
    torch::Tensor target_log_prob;  ///< (N, 1): log-softmax at the target
    torch::Tensor log_sum_exp;      ///< (N), with kernels only
    /// With kernels, if there is one chunk and no gradients were computed.
    torch::Tensor scores;
  };
  struct Result {
    torch::Tensor loss;     ///< sum, float32
    torch::Tensor correct;  ///< as in LinearCrossEntropyResult
    ForwardState state;
  };
  Result forward(bool count_correct) const;

  /// Tensors for the gradients for a loss gradient of 1, of the operands that require one;
  /// the others are undefined. Weight and bias are float32. `hidden` has the type of the
  /// matrix products if that is bfloat16. In float16, whose small gradients need a loss
  /// scale, it is float32. `allocate` is false: tensors of these shapes without memory.
  CrossEntropyGradients make_unit_gradients(const CrossEntropyInputs& inputs,
                                            bool allocate) const;
  /// forward() that also computes `gradients`, which make_unit_gradients() made, for a loss
  /// gradient of 1. Requires at least one row.
  Result forward_with_gradients(bool count_correct,
                                CrossEntropyGradients& gradients) const;
  /// A tensor of the shape of all scores without memory.
  torch::Tensor scores_placeholder() const;

  /// Weight and bias gradients are float32. Overwrites `state.scores`.
  void backward(const torch::Tensor& loss_gradient, const ForwardState& state,
                CrossEntropyGradients& gradients) const;

 private:
  Result make_result(bool count_correct) const;
  void finish(Result& result) const;
  void forward_chunk(const torch::Tensor& scores, int64_t first, int64_t count,
                     Result& result) const;
  /// The gradient of the scores up to a factor per row. May overwrite `scores`.
  torch::Tensor backward_chunk(const torch::Tensor& scores, int64_t first,
                               int64_t count, const ForwardState& state) const;
  /// Both: returns the gradient of the scores for a loss gradient of 1.
  torch::Tensor gradient_chunk(const torch::Tensor& scores, int64_t first,
                               int64_t count, Result& result) const;
  void add_unit_gradients(const torch::Tensor& values, int64_t first,
                          int64_t count,
                          CrossEntropyGradients& gradients) const;
  torch::Tensor scores_of(int64_t first, int64_t count) const;
  torch::Tensor target_columns(int64_t first, int64_t count) const;

  torch::Tensor hidden_;   // (N, D), half precision
  torch::Tensor weight_;   // (V', D), half precision; zeros from row V on
  torch::Tensor bias_;     // (V'), half precision; undefined if not needed
  torch::Tensor targets_;  // (N)
  int64_t classes_;        // V
  int64_t ignore_index_;
  int64_t rows_per_chunk_;
  bool use_kernels_;
};

/// sums = (add ? sums : 0) + factor · values, computed in float32. `factor` is one float32
/// value on the device of the others; float32 and half-precision types may be mixed.
/// `sums` may be `values`.
void scaled_sum(torch::Tensor& sums, const torch::Tensor& values,
                const torch::Tensor& factor, bool add);

}  // namespace reprise::detail
