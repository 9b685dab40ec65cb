#pragma once

#include <torch/types.h>

/// Products of a layer's matrices: split_products.h's where they can be had, LibTorch's
/// elsewhere. No derivatives.
namespace reprise::lean {

/// a b, plus `bias` to each row where it is defined.
torch::Tensor product(const torch::Tensor& a, const torch::Tensor& b,
                      const torch::Tensor& bias = {});

/// As compat::product_as().
torch::Tensor product_as(const torch::Tensor& a, const torch::Tensor& b,
                         torch::ScalarType type);

/// As compat::add_product().
void add_product(torch::Tensor& sum, const torch::Tensor& a,
                 const torch::Tensor& b);

}  // namespace reprise::lean
