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
/// k, v (N, H, S, D). Returns (N, H, T, D).
///
/// Uses LibTorch's fused operator, which exists since 2.0; with earlier versions, the
/// fallback. Throws c10::Error if both `mask` and `causal` are set.
torch::Tensor attention(const torch::Tensor& q, const torch::Tensor& k,
                        const torch::Tensor& v,
                        const AttentionOptions& options = {});

namespace fallback {

/// Matrix products and a softmax. Saves one (N, H, T, S) tensor for the backward, two
/// with dropout.
torch::Tensor attention(const torch::Tensor& q, const torch::Tensor& k,
                        const torch::Tensor& v,
                        const AttentionOptions& options = {});

}  // namespace fallback
}  // namespace reprise::ops
