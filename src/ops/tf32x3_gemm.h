#pragma once

#include <torch/types.h>

namespace reprise {

/// Products of single precision on tensor cores, no less exact than the library's.
///
/// Tensor cores multiply TF32, values of 11 bits, and add up in single precision. A
/// value of single precision, of 24 bits, is the sum of two such, a big and a small
/// one, but for its last bit. So a product of matrices is three of TF32,
///
///     small · big + big · small + big · big,
///
/// the fourth being smaller than what single precision rounds off. Sums leave the tensor
/// cores, which cut them off instead of rounding, after 32 terms. The error is below
/// that of the library's products, which round after each term, and the speed about
/// twice theirs; see docs/ops.md.
///
/// An infinite value gives NaN, as does one within 1/4096 of the largest.
///
/// For lean_linear() where WeightCopies has the weight in single precision, on devices
/// of compute capability 9.0 (H100, H200), for products that are large enough and whose
/// sizes and strides are multiples of four; the library has all others.

/// Whether they may be taken, for as long as the process runs. They may at the start.
void allow_split_products(bool allowed);

/// Whether products on `device` are taken so, those that can be.
bool takes_split_products(const torch::Device& device);

}  // namespace reprise
