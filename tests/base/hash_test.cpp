#include "base/hash.h"

#include <gtest/gtest.h>

namespace reprise {
namespace {

/// Test vectors of the FNV reference implementation (test_fnv.c).
TEST(Hash, Fnv1aMatchesTheReference) {
  EXPECT_EQ(fnv1a(""), 0xcbf29ce484222325u);
  EXPECT_EQ(fnv1a("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(fnv1a("foobar"), 0x85944171f73967e8u);
  EXPECT_EQ(fnv1a("chongo was here!\n"), 0x46810940eff5f915u);
}

TEST(Hash, Fnv1aHashesBytesAsUnsigned) {
  EXPECT_EQ(fnv1a("\xff"), (0xcbf29ce484222325u ^ 0xff) * 0x100000001b3u);
  EXPECT_NE(fnv1a(std::string_view("\0", 1)), fnv1a(""));
}

TEST(Hash, Fnv1aIsAConstantExpression) {
  static_assert(fnv1a("a") == 0xaf63dc4c8601ec8cu);
}

}  // namespace
}  // namespace reprise
