#pragma once

#include <torch/types.h>

namespace reprise::detail {

/// Float32 matrix products on tensor cores, at least as accurate as the library's.
///
/// Tensor cores multiply TF32 values, of 11 significant bits, and accumulate in float32. A
/// float32 value, of 24 significant bits, is the sum of two TF32 values, a big and a small
/// one, up to its last bit. A matrix product is therefore three TF32 products,
///
///     small · big + big · small + big · big;
///
/// the fourth is below the rounding error of float32. Tensor cores truncate sums instead of
/// rounding them, so partial sums leave them after 32 terms. The error is below that of the
/// library's products, which round after each term, and the speed is about twice theirs;
/// see docs/ops.md.
///
/// An infinite value gives NaN, as does one within 1/4096 of the largest finite value.
///
/// Used by ops::linear() if WeightCopies holds the weight in float32, on devices of compute
/// capability 9.0 (H100, H200), for products that are large enough and whose sizes and
/// strides are multiples of four.

/// Allows or forbids these products in this process. Allowed by default.
void allow_tf32x3_gemm(bool allowed);

/// Whether supported products on `device` are computed this way.
bool uses_tf32x3_gemm(const torch::Device& device);

}  // namespace reprise::detail
