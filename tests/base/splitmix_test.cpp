#include "base/splitmix.h"

#include <gtest/gtest.h>

#include <array>
#include <set>

namespace reprise::detail {
namespace {

constexpr uint64_t kGamma = 0x9e3779b97f4a7c15;

/// Outputs of the reference implementation (Vigna, splitmix64.c) with seed 1234567. Its
/// state before output n is the seed plus n times the golden gamma.
TEST(Splitmix, MatchesTheReference) {
  const std::array<uint64_t, 5> expected = {
      6457827717110365317u, 3203168211198807973u, 9817491932198370423u,
      4593380528125082431u, 16408922859458223821u};
  for (uint64_t n = 0; n < expected.size(); ++n) {
    EXPECT_EQ(splitmix(1234567 + n * kGamma), expected[n]) << n;
  }
  EXPECT_EQ(splitmix(0), 0xe220a8397b1dcdafu);
}

TEST(Splitmix, PairsDependOnBothNumbersAndTheirOrder) {
  std::set<uint64_t> seen;
  for (uint64_t a = 0; a < 64; ++a) {
    for (uint64_t b = 0; b < 64; ++b) seen.insert(splitmix(a, b));
  }
  EXPECT_EQ(seen.size(), 64u * 64u);
}

}  // namespace
}  // namespace reprise::detail
