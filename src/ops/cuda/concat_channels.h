#pragma once

#include "dtype.h"
#include "kernel.h"

#include <cstdint>

/// CUDA kernels of ops::concat_channels(): one pass forward and one backward over
/// channels-last images. Tested by tests/ops/concat_test.cpp.
namespace reprise::detail::kernels {

struct ConcatShape {
  int64_t rows = 0;                        ///< pixels of all images
  int64_t a_channels = 0, b_channels = 0;  ///< multiples of 4 (float32) or 8
  DType type = DType::kFloat32;
};

/// Pointers are aligned to 16 bytes.
struct ConcatForward {
  ConcatShape shape{};
  const void* a = nullptr;  ///< (rows, a_channels)
  const void* b = nullptr;
  const float* bias = nullptr;  ///< of b; may be null
  void* y = nullptr;            ///< output: (rows, a_channels + b_channels)
};
REPRISE_KERNEL(concat_forward, ConcatForward);

struct ConcatBackward {
  ConcatShape shape{};
  const void* dy = nullptr;
  // Outputs; null: not computed.
  void* da = nullptr;
  void* db = nullptr;
};
REPRISE_KERNEL(concat_backward, ConcatBackward);

}  // namespace reprise::detail::kernels
