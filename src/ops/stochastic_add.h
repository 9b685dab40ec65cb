#pragma once

#include <torch/types.h>

#include <cstdint>

namespace reprise::detail {

/// sums += values, where `sums` is bfloat16 and `values` float32, both dense with the same strides. The float32
/// sum is rounded up or down at random, with probabilities that make the expected value exact:
/// values that are too small to change a bfloat16 number add up over many calls. The result
/// depends on the arguments only, and is the same on the CPU and on CUDA devices with kernels.
/// Tested by tests/ops/stochastic_add_test.cpp.
void add_stochastically(torch::Tensor sums, const torch::Tensor& values,
                        uint64_t seed);

}  // namespace reprise::detail
