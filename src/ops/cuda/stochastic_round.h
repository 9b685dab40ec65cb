#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define REPRISE_HOST_DEVICE __host__ __device__
#else
#define REPRISE_HOST_DEVICE
#endif

/// Stochastic rounding to bfloat16, the same on the CPU and in CUDA kernels. Tested by
/// tests/ops/stochastic_add_test.cpp.
namespace reprise::detail::kernels {

/// 64 random bits of element group `index`: four elements with 16 bits each. They depend on
/// the arguments only (the finalizer of splitmix64).
REPRISE_HOST_DEVICE inline uint64_t random_bits(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

/// Rounds a float32, given and returned as bits, to one of the two nearest values of bfloat16.
/// `random`: 16 bits; the upper value is chosen for that share of them that makes the expected
/// value exact.
REPRISE_HOST_DEVICE inline uint16_t round_stochastically(uint32_t bits,
                                                         uint32_t random) {
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  if (finite) return static_cast<uint16_t>((bits + random) >> 16);
  const bool nan = (bits & 0x007fffffu) != 0;
  return static_cast<uint16_t>((bits >> 16) | (nan ? 0x40u : 0u));
}

REPRISE_HOST_DEVICE inline uint32_t bits_of(float value) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
REPRISE_HOST_DEVICE inline float float_of(uint16_t bfloat16) {
  const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
  float value = 0;
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace reprise::detail::kernels
