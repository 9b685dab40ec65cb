#pragma once

#include <torch/types.h>

namespace reprise::ops {

struct AttentionOptions {
  /// Broadcasts to (N, H, T, S). Boolean: true positions take part. Otherwise added to
  /// the scores. Default: no mask.
  torch::Tensor mask{};
  /// Position t attends to positions up to t only. Cannot be combined with a mask.
  bool causal = false;
  /// Probability of dropping an attention weight. Must be 0 outside of training.
  double dropout = 0;
};

/// Scaled dot-product attention, softmax(q kᵀ / √D) v, of q (N, H, T, D) and
/// k, v (N, G, S, D). Returns (N, H, T, D). H is a multiple of G: in grouped-query attention
/// each of the G heads of keys and values serves H / G consecutive heads of queries.
///
/// Uses LibTorch's fused operator, which exists since 2.0; with earlier versions, the
/// fallback. With fewer heads of keys than of queries, keys and values are repeated only for
/// fused kernels that cannot share them: all but those for half precision on CUDA without
/// a mask, since LibTorch 2.5. Throws c10::Error if both `mask` and `causal` are set, or if
/// the heads do not fit.
torch::Tensor attention(const torch::Tensor& q, const torch::Tensor& k,
                        const torch::Tensor& v,
                        const AttentionOptions& options = {});

namespace fallback {

/// Matrix products and a softmax. Saves one (N, H, T, S) tensor for the backward, two
/// with dropout. Never repeats keys and values.
torch::Tensor attention(const torch::Tensor& q, const torch::Tensor& k,
                        const torch::Tensor& v,
                        const AttentionOptions& options = {});

}  // namespace fallback
}  // namespace reprise::ops
