#pragma once

#include <ATen/core/Tensor.h>

/// Matrix products whose result has another type than the operands. Not differentiable.
/// Tested by tests/ops/linear_test.cpp and tests/ops/half_cross_entropy_test.cpp.
namespace reprise::compat {

/// sum += a b. `sum` may be float32 if `a` and `b` are float16 or bfloat16: on CUDA, since
/// LibTorch 2.8, the product is then accumulated in float32 without intermediate rounding;
/// otherwise it is rounded to the type of `a` first.
void gemm_add(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b);

/// out = a b, rounded as by gemm_add().
void gemm_into(at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

/// Whether products of half-precision matrices on `device` are accumulated in float32
/// without intermediate rounding.
bool gemm_widens(const at::Device& device);

/// a b as a new tensor of `type`, rounded as by gemm_add().
at::Tensor gemm_as(const at::Tensor& a, const at::Tensor& b,
                   at::ScalarType type);

}  // namespace reprise::compat
