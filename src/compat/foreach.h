#pragma once

#include <ATen/core/Tensor.h>

namespace reprise::compat {

/// Copies from[i] to to[i] for all i. Shapes must be equal; types may differ. On CUDA, one
/// launch per type of `to` if LibTorch supports it; the tensors of `from` that go to one
/// type must then have one type as well. Allocates no memory on the CPU.
void copy_list(at::TensorList to, at::TensorList from);

/// sums[i] += terms[i] for all i. Shapes and types must be equal. On CUDA, one launch per
/// type.
void add_list(at::TensorList sums, at::TensorList terms);

/// Sets all tensors to zero. On CUDA, one launch per type. Allocates no memory.
void zero_list(at::TensorList tensors);

}  // namespace reprise::compat
