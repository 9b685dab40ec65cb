#include "base/throw_error.h"

#include <reprise/base/error.h>

#include <gtest/gtest.h>

#include <cerrno>

namespace reprise::detail {
namespace {

TEST(Error, CarriesTheFormattedMessage) {
  try {
    throw_error("[file] cannot write {}: {}", "a.txt", 28);
    FAIL() << "throw_error() returned";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[file] cannot write a.txt: 28");
  }
}

TEST(Error, IsAStandardException) {
  EXPECT_THROW(throw_error("braces {{}}"), std::runtime_error);
}

TEST(Error, SystemReasonIsThatOfErrno) {
  EXPECT_EQ(system_reason(ENOENT), "No such file or directory");
  errno = ENOSPC;
  EXPECT_EQ(system_reason(), "No space left on device");
}

}  // namespace
}  // namespace reprise::detail
