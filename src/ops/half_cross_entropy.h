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
/// Tested by tests/ops/loss_test.cpp.
class HalfCrossEntropy {
 public:
  /// Requires a half-precision settings.gemm_type and a float32 loss.
  HalfCrossEntropy(const CrossEntropyInputs& inputs,
                   const CrossEntropySettings& settings);

  /// What the backward needs from the forward.
  struct ForwardState {
    torch::Tensor target_log_prob;  ///< (N, 1): log-softmax at the target
    torch::Tensor log_sum_exp;      ///< (N), with kernels only
    torch::Tensor scores;           ///< with kernels, if there was one chunk
  };
  struct Result {
    torch::Tensor loss;     ///< sum, float32
    torch::Tensor correct;  ///< as in LinearCrossEntropyResult
    ForwardState state;
  };
  Result forward(bool count_correct) const;

  /// Weight and bias gradients are float32. Overwrites `state.scores`.
  void backward(const torch::Tensor& loss_gradient, const ForwardState& state,
                CrossEntropyGradients& gradients) const;

 private:
  void forward_chunk(const torch::Tensor& scores, int64_t first, int64_t count,
                     Result& result) const;
  /// The gradient of the scores up to a factor per row. May overwrite `scores`.
  torch::Tensor backward_chunk(const torch::Tensor& scores, int64_t first,
                               int64_t count, const ForwardState& state) const;
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

}  // namespace reprise::detail
