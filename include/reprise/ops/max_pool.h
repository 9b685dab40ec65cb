#pragma once

#include <torch/types.h>

#include <cstdint>

namespace reprise {

struct MaxPoolOptions {
  int64_t kernel = 2;  ///< side of the window
  int64_t stride = 0;  ///< 0: as the kernel
  int64_t padding = 0;
};

/// torch::max_pool2d(x) of x (N, C, H, W), the same in every bit, forward and
/// backward. That keeps x and, for each output, the place of its maximum as an
/// index of 8 bytes; this keeps the place within the window, in one byte.
///
///     kept an output, kernel 2      torch::max_pool2d     here
///     single precision              4·4 (x) + 8 bytes     1 byte
///
/// Indices of 8 bytes exist for some samples at a time. Where a window has more
/// than 256 places or is wider than x, this is torch::max_pool2d. No second
/// derivative.
torch::Tensor lean_max_pool2d(const torch::Tensor& x,
                              const MaxPoolOptions& options = {});

/// torch::max_pool2d(torch::relu(x)), the same likewise; of both only the output
/// and a byte for each of its values is kept. The maximum of a window is
/// positive before the ReLU where it is after it, so the output says where a
/// gradient passes, and the ReLU's own output, as large as x, is not needed.
torch::Tensor lean_relu_max_pool2d(const torch::Tensor& x,
                                   const MaxPoolOptions& options = {});

}  // namespace reprise
