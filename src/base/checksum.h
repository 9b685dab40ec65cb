#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace reprise {

/// A checksum of 64 bits that detects damage: flipped bits, missing and exchanged bytes. It
/// runs at the speed of memory. Not cryptographic. The value depends on the bytes only, not on
/// how they are divided among the calls of add(), and is the same in every build.
///
/// A change within one aligned word of eight bytes always changes the value; any other change
/// does so except with a probability of 2^-64.
class Checksum {
 public:
  void add(const void* bytes, size_t count);
  uint64_t value() const;

 private:
  static constexpr size_t kLanes = 8;
  static constexpr size_t kBlock = kLanes * sizeof(uint64_t);

  void mix(const unsigned char* block);

  std::array<uint64_t, kLanes> lanes_{1, 2, 3, 4, 5, 6, 7, 8};
  std::array<unsigned char, kBlock> rest_{};  // bytes of an incomplete block
  uint64_t count_ = 0;                        // of all bytes
};

/// Checksum of some bytes.
uint64_t checksum_of(const void* bytes, size_t count);

}  // namespace reprise
