#pragma once

#include "kernel.h"

#include <cstdint>

/// CUDA kernel for split_weights(). Tested by tests/ops/split_weights_test.cpp.
namespace reprise::detail::kernels {

/// Replaces each row of float32 values by their upper halves, bfloat16, followed by their
/// lower halves, or the other way round; see ops/split_weights.h. In place, row by row.
struct SplitWeights {
  static constexpr int64_t kMaxColumns = 16384;

  int64_t rows = 0;
  int64_t columns = 0;  ///< a multiple of 8, at most kMaxColumns
  float* weights =
      nullptr;         ///< (rows, columns), contiguous, aligned to 16 bytes
  bool merge = false;  ///< back to float32
};
REPRISE_KERNEL(split_weights, SplitWeights);

}  // namespace reprise::detail::kernels
