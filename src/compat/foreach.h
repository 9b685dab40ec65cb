#pragma once

#include <ATen/core/Tensor.h>

namespace reprise::compat {

/// Copies each tensor of `from`, all of one type for one type in `to`, into the one
/// at its place in `to`, of the same shape: in one call of the device for all of a
/// type, where LibTorch has it. Takes no memory on the CPU.
void copy_list(at::TensorList to, at::TensorList from);

/// Adds each tensor of `terms` to the one at its place in `sums`, of the same shape
/// and type, in place: in one call of the device for all of a type.
void add_list(at::TensorList sums, at::TensorList terms);

/// Sets every tensor to zero, where it is: in one call of the device for all of a
/// type. Takes no memory.
void zero_list(at::TensorList tensors);

}  // namespace reprise::compat
