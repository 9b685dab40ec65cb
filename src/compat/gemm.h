#pragma once

#include <ATen/core/Tensor.h>

namespace reprise::compat {

/// Adds the product of the matrices `a` and `b` to `sum`, which may be of single
/// precision where they are of half: on CUDA, from LibTorch 2.8 on, in one product
/// that rounds to single precision alone; elsewhere the product is rounded to the
/// type of `a` first. No derivative.
void add_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b);

/// The product of `a` and `b` as a new tensor of type `type`, rounded alike.
at::Tensor product_as(const at::Tensor& a, const at::Tensor& b,
                      at::ScalarType type);

}  // namespace reprise::compat
