#include "compat/attention.h"

#include "compat/autocast.h"

#include <c10/util/Exception.h>
#include <torch/types.h>
#include <torch/version.h>

#include <optional>

namespace reprise::compat {

#if TORCH_VERSION_MAJOR >= 2

bool has_fused_attention() {
  return true;
}

namespace {

/// Each head (dimension 1) `count` times in a row.
torch::Tensor repeat_heads(const torch::Tensor& x, int64_t count) {
  if (count == 1) return x;
  return x.unsqueeze(2)
      .expand({x.size(0), x.size(1), count, x.size(2), x.size(3)})
      .reshape({x.size(0), x.size(1) * count, x.size(2), x.size(3)});
}

}  // namespace

torch::Tensor fused_attention(const torch::Tensor& q, const torch::Tensor& keys,
                              const torch::Tensor& values,
                              const torch::Tensor& mask, double dropout,
                              bool causal) {
  const int64_t shared = q.size(1) / keys.size(1);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 5
  // Only the kernels for half precision without a mask share heads. For other arguments
  // LibTorch would store all scores.
  const auto type = autocast_type(q);
  if (shared > 1 && q.is_cuda() && !mask.defined() &&
      (type == torch::kHalf || type == torch::kBFloat16)) {
    return at::scaled_dot_product_attention(q, keys, values, {}, dropout,
                                            causal, std::nullopt,
                                            /*enable_gqa=*/true);
  }
#endif
  const torch::Tensor k = repeat_heads(keys, shared);
  const torch::Tensor v = repeat_heads(values, shared);
  if (!mask.defined()) {
    return at::scaled_dot_product_attention(q, k, v, {}, dropout, causal);
  }
  return at::scaled_dot_product_attention(q, k, v, mask, dropout, causal);
}

#else

bool has_fused_attention() {
  return false;
}

torch::Tensor fused_attention(const torch::Tensor&, const torch::Tensor&,
                              const torch::Tensor&, const torch::Tensor&,
                              double, bool) {
  TORCH_CHECK(false, "[fused_attention] expected LibTorch 2.0 or later");
}

#endif

}  // namespace reprise::compat
