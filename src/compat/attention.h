#pragma once

#include <torch/types.h>

namespace reprise::compat {

/// Whether LibTorch has scaled_dot_product_attention (2.0 and later).
/// Tested by tests/ops/attention_test.cpp.
bool has_fused_attention();

/// at::scaled_dot_product_attention(); `mask` may be undefined. If k and v have fewer heads
/// (dimension 1) than q, consecutive heads of q share one; unless the kernel supports that,
/// they are repeated. Throws c10::Error unless has_fused_attention().
torch::Tensor fused_attention(const torch::Tensor& q, const torch::Tensor& k,
                              const torch::Tensor& v, const torch::Tensor& mask,
                              double dropout, bool causal);

}  // namespace reprise::compat
