#pragma once

#include <torch/types.h>

/// Weights whose bfloat16 copies take no memory. Tested by tests/ops/split_weights_test.cpp.
///
/// The upper 16 bits of a float32 value, rounded, are its bfloat16 value, and the difference
/// fits in the other 16 bits as a signed number. A split weight has these upper halves in the
/// first half of each row and the lower halves in the second, so that matrix products can
/// read the bfloat16 matrix in place, and merging restores every bit.
namespace reprise::detail {

/// Whether the weight can be split: a contiguous float32 matrix with rows of a multiple of
/// 8 values.
bool can_split(const torch::Tensor& weight);

/// The bfloat16 matrix inside a weight, valid while it is split. Values exactly between two
/// bfloat16 values are rounded away from zero; conversions round them to the even one.
torch::Tensor upper_half(const torch::Tensor& weight);

/// Splits a weight in place. Its float32 values are not readable until merge_weight().
void split_weight(const torch::Tensor& weight);

/// Restores the values of a split weight.
void merge_weight(const torch::Tensor& weight);

}  // namespace reprise::detail
