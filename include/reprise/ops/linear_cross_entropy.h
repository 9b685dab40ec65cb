#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>

namespace reprise {

/// How the gradient of the weight adds up over the rows.
enum class WeightGradient {
  /// Whole for some columns of the scores after others, which are computed once
  /// more for it: the additions are those of one large product.
  kByColumns,
  /// Rows after rows, added to what is there: a product less, and sums of sums
  /// instead of one sum.
  kByRows,
};

struct LinearCrossEntropyOptions {
  /// How many scores are computed at a time; a row of them at least. 0: 2^22, 16
  /// MiB in single precision; on CUDA, which wants more work at a time, 2^24; with
  /// kernels of ours, which need no copies of the scores, 2^26 in half precision, or an
  /// eighth of them all where that is more.
  int64_t chunk_scores = 0;
  int64_t ignore_index = -100;
  /// Default: kByRows on CUDA, where additions have no fixed order anyway,
  /// kByColumns elsewhere.
  std::optional<WeightGradient> weight_gradient{};
  /// What the softmax is computed in and the loss is given in. Default: single
  /// precision, double where `hidden` is.
  std::optional<torch::ScalarType> loss_type{};
  bool count_right = false;
};

struct LinearCrossEntropy {
  torch::Tensor loss;  ///< sum over the rows that are not ignored
  /// How many rows have their largest score at the target, int64; undefined
  /// unless asked for.
  torch::Tensor right;
};

/// The sum of the cross entropies of `hidden · weightᵀ + bias` (N, V) and
/// `targets` (N) int64, without the scores (N, V) ever being whole: neither in
/// the forward nor in the backward, where they are computed again.
///
/// hidden (N, D), weight (V, D), bias (V) or undefined. Products are in
/// autocast's type where autocast is on. For the backward only the arguments
/// themselves are kept; and with kernels, where one part is all, the scores: the
/// backward would compute them first of all.
///
///                   plain, single precision     here
///     kept          N·V·4 bytes                 nothing
///     while it runs another 2·N·V·4 bytes       3·chunk_scores·4 bytes
///     products      3 (1 + 2) of N·D·V          5 by columns, 4 by rows
///
/// The other known way computes the gradients in the forward and scales them by
/// the loss's gradient later: 3 products, and the gradient of the weight held
/// from then on. It is not here: the scaling rounds once more, and half
/// precision's small gradients are lost before their scale is known.
///
/// Where WeightCopies has a copy of `weight`, it is used, and by rows the weight's
/// gradient is added to `weight.grad()` itself, as in lean_linear().
///
/// Loss and gradients equal the plain ones in all bits where one chunk is enough,
/// and by columns as far as a product's rows and columns do not depend on how many
/// others are computed with them; that is up to the library and the processor,
/// and otherwise they agree to rounding: see docs/ops.md. No second derivative.
/// Throws c10::Error on shapes that do not fit.
LinearCrossEntropy linear_cross_entropy(
    const torch::Tensor& hidden, const torch::Tensor& weight,
    const torch::Tensor& bias, const torch::Tensor& targets,
    const LinearCrossEntropyOptions& options = {});

}  // namespace reprise
