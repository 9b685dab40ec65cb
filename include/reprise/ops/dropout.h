#pragma once

#include <torch/types.h>

namespace reprise {

/// torch::dropout(x, p, train), the same in every bit, forward and backward, and
/// with the same random numbers. On the CPU LibTorch's keeps the factor of each
/// value, 4 bytes in single precision; this keeps a byte. On CUDA LibTorch's own
/// keeps a byte, and this is that, as it is for an x that is not contiguous. No
/// second derivative on the CPU.
torch::Tensor lean_dropout(const torch::Tensor& x, double p, bool train);

}  // namespace reprise
