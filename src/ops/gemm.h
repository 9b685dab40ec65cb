#pragma once

#include <torch/types.h>

/// Matrix products for operators: with the kernel of tf32x3_gemm.h if it supports the
/// operands, with LibTorch otherwise. Not differentiable.
/// Tested by tests/ops/linear_test.cpp.
namespace reprise::detail {

/// a b, plus `bias` in each row if it is defined.
torch::Tensor gemm(const torch::Tensor& a, const torch::Tensor& b,
                   const torch::Tensor& bias = {});

/// residual + a b + bias, in the type of `residual`, which has the rows of the product.
/// `bias` may be undefined. Equal to residual + gemm(a, b, rounded_bias) if the library
/// cannot add within the product, which rounds less. `rounded_bias`: in the type of a.
torch::Tensor gemm_plus(const torch::Tensor& residual, const torch::Tensor& a,
                        const torch::Tensor& b, const torch::Tensor& bias,
                        const torch::Tensor& rounded_bias);

/// A tensor in the place of a b, or of gemm_plus() if `residual` is not empty, whose values are
/// undefined.
torch::Tensor unused_product(const torch::Tensor& a, const torch::Tensor& b,
                             const torch::Tensor& residual);

/// a b as a tensor of `type`; see compat::gemm_as().
torch::Tensor gemm_as(const torch::Tensor& a, const torch::Tensor& b,
                      torch::ScalarType type);

/// sum += a b; see compat::gemm_add().
void gemm_add(torch::Tensor& sum, const torch::Tensor& a,
              const torch::Tensor& b);

}  // namespace reprise::detail
