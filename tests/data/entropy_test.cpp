#include "files.h"
#include "support.h"

#include <reprise/data/entropy.h>

#include <gtest/gtest.h>

#include <cmath>

namespace {

using namespace reprise::testing;
using reprise::unigram_entropy_of_text;

TEST(Entropy, KnownValues) {
  const Folder folder;
  write_bytes(folder / "one", "aaaa");
  EXPECT_EQ(unigram_entropy_of_text(folder / "one"), 0);
  write_bytes(folder / "two", "abab");
  EXPECT_DOUBLE_EQ(unigram_entropy_of_text(folder / "two"), std::log(2));
  write_bytes(folder / "three", "aab\xff");  // 1/2, 1/4, 1/4
  EXPECT_DOUBLE_EQ(unigram_entropy_of_text(folder / "three"),
                   1.5 * std::log(2));
}

TEST(Entropy, EmptyOrMissing) {
  const Folder folder;
  write_bytes(folder / "empty", "");
  EXPECT_NE(error_of([&] {
              unigram_entropy_of_text(folder / "empty");
            }).find("is empty"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              unigram_entropy_of_text(folder / "none");
            }).find("No such file"),
            std::string::npos);
}

}  // namespace
