#pragma once

/// Float32 values as upper and lower halves; see ops/split_weights.h. Tested by
/// tests/ops/split_weights_test.cpp.
namespace reprise::detail::kernels {

/// Two float32 values as their upper and lower halves, packed.
__device__ inline void split_two(unsigned first, unsigned second,
                                 unsigned& upper, unsigned& lower) {
  const unsigned a = (first + 0x8000u) >> 16, b = (second + 0x8000u) >> 16;
  upper = a | b << 16;
  // What is missing, as a signed number of 16 bits.
  lower = ((first - (a << 16)) & 0xffffu) | (second - (b << 16)) << 16;
}

__device__ inline void merge_two(unsigned upper, unsigned lower,
                                 unsigned& first, unsigned& second) {
  const auto low = static_cast<int>(static_cast<short>(lower & 0xffffu));
  const auto high = static_cast<int>(static_cast<short>(lower >> 16));
  first = (upper << 16) + static_cast<unsigned>(low);
  second = (upper & 0xffff0000u) + static_cast<unsigned>(high);
}

}  // namespace reprise::detail::kernels
