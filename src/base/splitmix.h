#pragma once

#include <cstdint>

namespace reprise::detail {

/// Output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
/// number generators", 2014). The same on every machine. Consecutive arguments give
/// unrelated results.
inline uint64_t splitmix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Combines two numbers. Consecutive values of either give unrelated results.
inline uint64_t splitmix(uint64_t a, uint64_t b) {
  return splitmix(splitmix(a) + b);
}

}  // namespace reprise::detail
