#pragma once

#include <torch/types.h>

#include <cstdint>

namespace reprise::ops {

struct MaxPoolOptions {
  int64_t kernel = 2;  ///< side of the window
  int64_t stride = 0;  ///< 0: equal to the kernel
  int64_t padding = 0;
  /// Save one byte per output for the backward. Otherwise torch::max_pool2d() runs, unless
  /// there is a faster kernel, which saves bytes as well.
  bool compact = true;

  int64_t step() const { return stride == 0 ? kernel : stride; }
};

/// Equivalent to torch::max_pool2d(x) for x (N, C, H, W), forward and backward, bit for
/// bit, and saves less for the backward: one byte per output, the position of the maximum
/// in its window.
///
///     saved per output, kernel 2    torch::max_pool2d     this operator
///     float32                       4·4 (x) + 8 bytes     1 byte
///
/// On a GPU with kernels, windows of 2 × 2 and 3 × 3 elements, two apart, of channels-last
/// images are computed in one pass; maxima that are NaN then have no gradient. Otherwise
/// 8-byte indices exist for a few samples at a time only. The fallback runs if a window has
/// more than 256 elements or is wider than x. No second derivative. Throws c10::Error on
/// other shapes than (N, C, H, W), and on a kernel or stride below 1.
torch::Tensor max_pool2d(const torch::Tensor& x,
                         const MaxPoolOptions& options = {});

/// Equivalent to torch::max_pool2d(torch::relu(x)) likewise. Saves only the output and one
/// byte per output: the maximum of a window is positive before the ReLU if and only if it
/// is positive after it, so the output of the ReLU is not needed.
torch::Tensor relu_max_pool2d(const torch::Tensor& x,
                              const MaxPoolOptions& options = {});

namespace fallback {

/// torch::max_pool2d(x).
torch::Tensor max_pool2d(const torch::Tensor& x,
                         const MaxPoolOptions& options = {});

/// torch::max_pool2d(torch::relu(x)).
torch::Tensor relu_max_pool2d(const torch::Tensor& x,
                              const MaxPoolOptions& options = {});

}  // namespace fallback
}  // namespace reprise::ops
