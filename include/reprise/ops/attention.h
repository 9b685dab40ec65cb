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

/// Rotary position embedding: rotates the pairs (x[…, i], x[…, i + D/2]) of x (…, T, D) by
/// the angles whose cosines and sines are `cos` and `sin`, which broadcast to (…, T, D/2).
/// This is the order of Hugging Face's `rotate_half`.
///
/// Computes in the wider of the types of x and cos and returns the type of x, with the order
/// of dimensions in memory that x has. Autocast has no effect.
///
/// The backward rotates by the negative angles and needs neither x nor the result. The graph
/// holds `cos` and `sin`, which must not change before the backward and get no gradient.
/// KeptMeter does not count them if they are (T, D/2): tables that all layers share. With
/// angles per sample, they are saved as activations are. No second derivative. Throws
/// c10::Error if D is odd or the tables do not fit.
torch::Tensor rotary(const torch::Tensor& x, const torch::Tensor& cos,
                     const torch::Tensor& sin);

namespace fallback {

/// The same with products and concatenations of LibTorch. Saves nothing but the tables,
/// once per layer, and needs three more tensors of the size of x while it runs.
torch::Tensor rotary(const torch::Tensor& x, const torch::Tensor& cos,
                     const torch::Tensor& sin);

}  // namespace fallback

struct QueryKeyValue {
  torch::Tensor q;  ///< (N, heads, T, D)
  torch::Tensor k;  ///< (N, kv_heads, T, D)
  torch::Tensor v;  ///< (N, kv_heads, T, D)
};

/// Splits the packed projections qkv (N, T, (heads + 2 kv_heads) D), queries first, then keys
/// and values, into heads for attention(). With `cos` and `sin`, queries and keys are
/// rotated as by rotary().
///
/// The result replaces qkv, which must not be used afterwards: with the CUDA kernel,
/// queries and keys are rotated in place, and q, k and v share the memory of qkv. The
/// backward writes the gradient of qkv in one pass, in which it rotates back; autograd would
/// copy the three gradients together. The kernel supports float32 and half precision, D a
/// multiple of 8 or 16, and tables (T, D/2) or (N, 1, T, D/2); all others use the fallback.
/// Saves nothing but angles per sample. No second derivative. Throws c10::Error if the sizes
/// do not fit.
QueryKeyValue split_heads(const torch::Tensor& qkv, int64_t heads,
                          int64_t kv_heads, const torch::Tensor& cos = {},
                          const torch::Tensor& sin = {});

namespace fallback {

/// The same with views of LibTorch and ops::rotary().
QueryKeyValue split_heads(const torch::Tensor& qkv, int64_t heads,
                          int64_t kv_heads, const torch::Tensor& cos = {},
                          const torch::Tensor& sin = {});

}  // namespace fallback

}  // namespace reprise::ops
