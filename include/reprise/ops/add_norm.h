#pragma once

#include <torch/nn/modules/normalization.h>

namespace reprise {

/// A residual stream and its normalised rows.
struct AddedNorm {
  torch::Tensor sum;     ///< x + branch
  torch::Tensor normal;  ///< norm(sum)
};

/// x + branch, or x itself where `branch` is undefined, and LayerNorm over its last
/// dimension: what stands before each layer of a transformer with norms first.
///
///     const auto [r, n] = lean_add_norm(x, {}, first_norm);
///     const auto [s, m] = lean_add_norm(r, attention(n), second_norm);
///     return s + feed_forward(m);
///
/// On CUDA, with a stream in single precision, this is one operator: one pass over the
/// values forward, one backward that also adds the gradient which reaches `sum` from
/// elsewhere, and one for weight and bias. Under autocast `normal` is in autocast's
/// type, to which the next layer would convert it. Kept are `sum` and two values a row.
/// Equal to LibTorch's up to the order of additions; the same bits in every run.
/// Elsewhere it is LibTorch's own. No second derivative.
AddedNorm lean_add_norm(const torch::Tensor& x, const torch::Tensor& branch,
                        torch::nn::LayerNorm norm);

}  // namespace reprise
