#include "compat/attention.h"

#include <c10/util/Exception.h>
#include <torch/types.h>
#include <torch/version.h>

namespace reprise::compat {

#if TORCH_VERSION_MAJOR >= 2

bool has_fused_attention() {
  return true;
}

torch::Tensor fused_attention(const torch::Tensor& q, const torch::Tensor& k,
                              const torch::Tensor& v, const torch::Tensor& mask,
                              double dropout, bool causal) {
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
