#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>

namespace reprise::ops {

/// Order in which linear_cross_entropy() accumulates the gradient of the weight.
enum class WeightGradientOrder {
  /// Complete gradients for one chunk of columns (classes) after another. Computes the
  /// scores once more, and adds in the order of one large matrix product.
  kByColumns,
  /// One chunk of rows after another, added to the gradient so far. One matrix product
  /// less than kByColumns, but a sum of partial sums.
  kByRows,
};

struct LinearCrossEntropyOptions {
  /// Number of scores computed at a time, at least one row. 0 selects 2^22 (16 MiB in
  /// float32) on the CPU and 2^24 on CUDA. With CUDA kernels, which need no copies of the
  /// scores, it selects the larger of 2^26 and an eighth of all scores; with
  /// gradients_in_forward 4,096 rows, but at least 2^26 and at most 2^29 scores.
  int64_t chunk_scores = 0;
  int64_t ignore_index = -100;
  /// Default: kByRows on CUDA, kByColumns on the CPU.
  std::optional<WeightGradientOrder> weight_gradient{};
  /// Compute the gradients in the forward, for a loss gradient of 1, and multiply them by
  /// the loss gradient in the backward. The scores are then computed once. Ignored by
  /// columns and in other precisions than bfloat16 and, on CUDA since LibTorch 2.8,
  /// float16; and if no gradient is required, or autograd saves nothing, as in the first
  /// run of checkpoint(). Default: true with CUDA kernels if there are several chunks.
  std::optional<bool> gradients_in_forward{};
  /// Type of the softmax and of the loss. Default: float32, or float64 if `hidden` is.
  std::optional<torch::ScalarType> loss_type{};
  /// Also count the correct predictions.
  bool count_correct = false;
};

struct LinearCrossEntropyResult {
  torch::Tensor loss;  ///< sum over the rows that are not ignored
  /// Number of rows whose target has the largest score, int64. Undefined unless
  /// count_correct is set.
  torch::Tensor correct;
};

/// Sum of the cross entropies of the scores `hidden · weightᵀ + bias` (N, V) and `targets`
/// (N) int64. hidden (N, D), weight (V, D), bias (V) or undefined.
///
/// Scores are computed in chunks and never stored as a whole. The backward computes them
/// again, unless the forward computes the gradients. Matrix products run in the type that
/// autocast selects. Only the arguments are saved for the backward; if the kernels compute
/// all scores in one chunk, so are the scores, which the backward overwrites.
///
///                       fallback, float32     chunked, float32         gradients in forward
///     saved             4·N·V bytes           nothing                  2·N·D + 4·V·D bytes
///     temporary         2·4·N·V bytes         3·4·chunk_scores bytes   2·chunk_scores bytes
///     matrix products   3 (1 forward,         5 by columns, 4 by rows  3 (3 forward)
///                       2 backward)
///
/// With gradients in the forward, the gradient of `hidden` is rounded once before and once
/// after the multiplication by the loss gradient; in float16, which may underflow, it is
/// saved in float32. The gradient of the weight is accumulated in float32, and its memory
/// becomes the gradient if there is none yet. Gradients of operands that require none are
/// not computed.
///
/// If WeightCopies holds a copy of `weight`, it is used, and by rows the gradient of the
/// weight is added to `weight.grad()`, as in linear().
///
/// Loss and gradients equal the fallback's bit for bit if one chunk is enough. Otherwise
/// they do by columns if the results of the library's matrix product do not depend on the
/// number of rows and columns computed together, and to rounding if they do; see
/// docs/ops.md. No second derivative. Throws c10::Error on mismatched shapes.
LinearCrossEntropyResult linear_cross_entropy(
    const torch::Tensor& hidden, const torch::Tensor& weight,
    const torch::Tensor& bias, const torch::Tensor& targets,
    const LinearCrossEntropyOptions& options = {});

namespace fallback {

/// Computes all scores with one matrix product and calls LibTorch's cross entropy on them.
/// Ignores chunk_scores and weight_gradient.
LinearCrossEntropyResult linear_cross_entropy(
    const torch::Tensor& hidden, const torch::Tensor& weight,
    const torch::Tensor& bias, const torch::Tensor& targets,
    const LinearCrossEntropyOptions& options = {});

}  // namespace fallback
}  // namespace reprise::ops
