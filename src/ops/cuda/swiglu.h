#pragma once

#include "dtype.h"
#include "kernel.h"

#include <cstdint>

/// CUDA kernels of ops::swiglu(): one pass forward and one backward. Tested by
/// tests/ops/swiglu_test.cpp.
namespace reprise::detail::kernels {

struct SwigluShape {
  int64_t rows = 0;
  int64_t columns = 0;  ///< multiple of 4 (float32) or 8
  DType type = DType::kFloat32;
  /// Elements from one row to the next; multiples of 4 (float32) or 8.
  int64_t gate_stride = 0;
  int64_t up_stride = 0;
};

/// Pointers are aligned to 16 bytes. The result and its gradient are contiguous.
struct SwigluForward {
  SwigluShape shape{};
  const void* gate = nullptr;  ///< (rows, columns)
  const void* up = nullptr;
  // Output.
  void* result = nullptr;  ///< silu(gate) · up
};
REPRISE_KERNEL(swiglu_forward, SwigluForward);

struct SwigluBackward {
  SwigluShape shape{};
  const void* gate = nullptr;
  const void* up = nullptr;
  const void* dresult = nullptr;
  int64_t gradient_stride =
      0;  ///< from one row of dgate, and of dup, to the next
  // Outputs; null: not computed.
  void* dgate = nullptr;
  void* dup = nullptr;
};
REPRISE_KERNEL(swiglu_backward, SwigluBackward);

}  // namespace reprise::detail::kernels
