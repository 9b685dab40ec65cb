#pragma once

#include <torch/types.h>

namespace reprise::compat {

struct AttentionOptions {
  /// Broadcasts to (N, H, T, S). Boolean: true takes part; otherwise added to
  /// the scores. Undefined: none.
  torch::Tensor mask{};
  /// Position t sees positions up to t only. Not together with a mask.
  bool causal = false;
  /// Chance that a weight is dropped; 0 outside of training.
  double dropout = 0;
};

/// Scaled dot product attention, softmax(q kᵀ / √D) v, of q (N, H, T, D) and
/// k, v (N, H, S, D). LibTorch's fused operator where the version has it (2.0
/// and later); before that plain operators, which keep a (N, H, T, S) tensor or
/// two. Throws c10::Error on a mask together with `causal`.
torch::Tensor attention(const torch::Tensor& q, const torch::Tensor& k,
                        const torch::Tensor& v,
                        const AttentionOptions& options = {});

}  // namespace reprise::compat
