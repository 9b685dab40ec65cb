#pragma once

#include "dtype.h"
#include "kernel.h"

#include <algorithm>
#include <cstdint>

/// CUDA kernel that adds up the rows of a matrix: the gradient of a bias. No atomics:
/// results are reproducible bit for bit. Tested by tests/ops/kernels_test.cpp.
namespace reprise::detail::kernels {

/// Also of other kernels that add up rows.
struct ColumnSumsShape {
  int64_t rows = 0;
  int64_t columns = 0;            ///< multiples of 8 are faster
  DType type = DType::kBFloat16;  ///< bfloat16 or float16

  static constexpr int64_t kMinRowsPerPart = 64;
  static constexpr int64_t kMaxParts = 32;

  /// Number of parts that the rows are divided into on devices without clusters.
  int64_t parts() const {
    return std::clamp<int64_t>(rows / kMinRowsPerPart, 1, kMaxParts);
  }
  /// Number of floats of scratch memory.
  int64_t scratch_size() const { return parts() * columns; }
};

/// sums = (add ? sums : 0) + sum of the rows of `matrix`.
struct ColumnSums {
  ColumnSumsShape shape{};
  const void* matrix = nullptr;  ///< (rows, columns), contiguous
  float* scratch = nullptr;      ///< shape.scratch_size() floats
  float* sums = nullptr;         ///< (columns)
  bool add = false;
};
REPRISE_KERNEL(column_sums, ColumnSums);

}  // namespace reprise::detail::kernels
