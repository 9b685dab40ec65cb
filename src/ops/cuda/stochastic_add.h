#pragma once

#include "kernel.h"

#include <cstdint>

/// CUDA kernel of add_stochastically(). Tested by tests/ops/stochastic_add_test.cpp.
namespace reprise::detail::kernels {

/// sums = sums + values, rounded stochastically. Pointers are aligned to 8 and 16 bytes.
struct StochasticAdd {
  int64_t size = 0;
  uint16_t* sums = nullptr;  ///< bfloat16
  const float* values = nullptr;
  uint64_t seed = 0;
};
REPRISE_KERNEL(stochastic_add, StochasticAdd);

}  // namespace reprise::detail::kernels
