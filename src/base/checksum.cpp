#include "base/checksum.h"

#include "base/splitmix.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace reprise {
namespace {

// Odd factors, so that each step maps different lanes to different ones. The second one
// spreads the bits that the first only moves: otherwise two flipped bits could cancel out.
constexpr uint64_t kFactors[] = {0x9e3779b97f4a7c15u, 0xd6e8feb86659fd93u};
constexpr int kShift = 31;

static_assert(std::endian::native == std::endian::little,
              "words are read in little-endian order");

}  // namespace

void Checksum::mix(const unsigned char* block) {
  for (size_t i = 0; i < kLanes; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, block + i * sizeof word, sizeof word);
    uint64_t lane = (lanes_[i] ^ word) * kFactors[0];
    lane ^= lane >> kShift;
    lanes_[i] = lane * kFactors[1];
  }
}

void Checksum::add(const void* bytes, size_t count) {
  const auto* next = static_cast<const unsigned char*>(bytes);
  const size_t begun = count_ % kBlock;
  count_ += count;
  if (begun > 0) {
    const size_t part = std::min(count, kBlock - begun);
    std::copy_n(next, part, rest_.data() + begun);
    next += part;
    count -= part;
    if (begun + part < kBlock) return;
    mix(rest_.data());
  }
  for (; count >= kBlock; next += kBlock, count -= kBlock) mix(next);
  std::copy_n(next, count, rest_.data());
}

uint64_t Checksum::value() const {
  Checksum all = *this;
  const size_t begun = count_ % kBlock;
  if (begun > 0) {
    std::fill(all.rest_.begin() + begun, all.rest_.end(), 0);
    all.mix(all.rest_.data());
  }
  uint64_t value = detail::splitmix(count_);
  for (const uint64_t lane : all.lanes_) value = detail::splitmix(value ^ lane);
  return value;
}

uint64_t checksum_of(const void* bytes, size_t count) {
  Checksum sum;
  sum.add(bytes, count);
  return sum.value();
}

}  // namespace reprise
