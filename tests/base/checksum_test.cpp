#include "base/checksum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

namespace reprise {
namespace {

uint64_t sum(const std::string& bytes) {
  return checksum_of(bytes.data(), bytes.size());
}

std::string some_bytes(size_t count) {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) {
    bytes += static_cast<char>(i * i * 7 + i / 3);
  }
  return bytes;
}

/// States on disk contain these values: they must never change.
TEST(Checksum, IsTheSameInEveryBuild) {
  EXPECT_EQ(sum(""), 0x002c770a2475d6beu);
  EXPECT_EQ(sum("a"), 0x7d849b0eb914d716u);
  EXPECT_EQ(sum(some_bytes(1000)), 0x6f0811887b03bfc5u);
}

TEST(Checksum, DoesNotDependOnTheParts) {
  const std::string bytes = some_bytes(200);
  for (size_t first = 0; first <= bytes.size(); ++first) {
    for (const size_t second : {size_t{0}, size_t{1}, size_t{31}, size_t{70}}) {
      const size_t middle = std::min(bytes.size(), first + second);
      Checksum parts;
      parts.add(bytes.data(), first);
      parts.add(bytes.data() + first, middle - first);
      parts.add(bytes.data() + middle, bytes.size() - middle);
      ASSERT_EQ(parts.value(), sum(bytes)) << first << " " << second;
    }
  }
}

TEST(Checksum, SeesEveryBitAndEveryLength) {
  std::set<uint64_t> seen;
  const std::string whole = some_bytes(130);
  for (size_t i = 0; i < whole.size() * 8; ++i) {
    std::string flipped = whole;
    flipped[i / 8] = static_cast<char>(flipped[i / 8] ^ (1 << i % 8));
    EXPECT_TRUE(seen.insert(sum(flipped)).second) << "bit " << i;
  }
  for (size_t length = 0; length <= 130; ++length) {
    EXPECT_TRUE(seen.insert(sum(whole.substr(0, length))).second) << length;
    // Zeros at the end are not the same as none.
    EXPECT_TRUE(seen.insert(sum("x" + std::string(length, '\0'))).second);
  }
}

TEST(Checksum, SeesTheOrder) {
  std::string bytes = some_bytes(256);
  const uint64_t before = sum(bytes);
  for (size_t from = 0; from + 8 < bytes.size(); from += 8) {
    std::string moved = bytes;
    std::swap_ranges(moved.begin() + static_cast<std::ptrdiff_t>(from),
                     moved.begin() + static_cast<std::ptrdiff_t>(from) + 8,
                     moved.end() - 8);
    EXPECT_NE(sum(moved), before) << from;
  }
}

}  // namespace
}  // namespace reprise
