#pragma once

#include <torch/types.h>

namespace reprise::ops {

/// Equivalent to torch::dropout(x, p, train) bit for bit, with the same random numbers,
/// and saves less for the backward.
///
/// On the CPU, LibTorch saves the scale of each element (4 bytes in float32); this operator
/// saves one byte per element. It applies to contiguous tensors. On CUDA, where LibTorch
/// saves one byte as well, and for other layouts, the fallback runs. No second derivative
/// on the CPU.
torch::Tensor dropout(const torch::Tensor& x, double p, bool train);

namespace fallback {

/// torch::dropout(x, p, train).
torch::Tensor dropout(const torch::Tensor& x, double p, bool train);

}  // namespace fallback
}  // namespace reprise::ops
