#pragma once

#include <cstdint>

namespace reprise::detail {

/// Steele, Lea and Flood's SplitMix64 ("Fast splittable pseudorandom number
/// generators", 2014): the output function. Equal on every machine, and good
/// even where the arguments are 0, 1, 2, …
inline uint64_t splitmix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// One number of two, such that neighbours of either have nothing in common.
inline uint64_t splitmix(uint64_t a, uint64_t b) {
  return splitmix(splitmix(a) + b);
}

}  // namespace reprise::detail
