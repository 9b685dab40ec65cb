#pragma once

#include "dtype.h"
#include "kernel.h"

#include <cstdint>

/// CUDA kernel that scales gradients by a factor in device memory.
/// Tested by tests/ops/half_cross_entropy_test.cpp.
namespace reprise::detail::kernels {

/// sums = (add ? sums : 0) + factor · values, computed in float32.
struct ScaledSum {
  int64_t count = 0;
  const float* factor = nullptr;  ///< one value
  const void* values = nullptr;
  DType values_type = DType::kFloat32;
  void* sums = nullptr;  ///< may be `values` if the types are equal
  DType sums_type = DType::kFloat32;
  bool add = false;
};
REPRISE_KERNEL(scaled_sum, ScaledSum);

}  // namespace reprise::detail::kernels
