#pragma once

#include "ops/cuda/rotate_heads.h"

#include <torch/types.h>

/// Operands of the kernel that rotates heads. Tested by tests/ops/rotary_test.cpp and
/// tests/ops/split_heads_test.cpp.
namespace reprise::detail {

/// Whether the kernel can read or write the heads x (N, heads, T, D), apart from the number
/// of channels.
bool has_kernel_layout(const torch::Tensor& x);

/// A launch for heads like x (N, heads, T, D), without parts. `cos` and `sin`: (T, D/2) or
/// (N, 1, T, D/2); undefined if nothing is rotated. Returns false if the kernel does not
/// support their sizes or types.
bool prepare_rotation(const torch::Tensor& x, const torch::Tensor& cos,
                      const torch::Tensor& sin, kernels::RotateHeads& launch);

/// Describes a part of the heads. Both tensors are (N, heads, T, D).
kernels::HeadsPart heads_part(const torch::Tensor& from,
                              const torch::Tensor& to, bool rotates);

/// x (…, T, D) rotated with the kernel, or rotated back if `inverse`. Undefined if the
/// kernel does not support the arguments.
torch::Tensor run_rotate(const torch::Tensor& x, const torch::Tensor& cos,
                         const torch::Tensor& sin, bool inverse);

}  // namespace reprise::detail
