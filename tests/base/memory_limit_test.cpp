#include "base/memory_limit.h"

#include "base/process.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace reprise {
namespace {

TEST(MemoryLimit, IsReadFromTheEnvironment) {
  const char* const before = std::getenv(kMemoryLimitVariable);
  ASSERT_EQ(before, nullptr);
  EXPECT_EQ(memory_limit_from_environment(), 0);
  setenv(kMemoryLimitVariable, "4096", 1);
  EXPECT_EQ(memory_limit_from_environment(), 4096);
  setenv(kMemoryLimitVariable, "much", 1);
  EXPECT_EQ(memory_limit_from_environment(), 0);
  unsetenv(kMemoryLimitVariable);
  EXPECT_GT(limited_memory_bytes(), 0);
}

TEST(MemoryLimit, IsPassedToProgramsThatLimitThemselves) {
  const std::vector<std::string> shell = {
      "/bin/sh", "-c", "ulimit -d; echo \"$REPRISE_MEMORY_LIMIT\""};
  const auto itself = run_process(
      shell, {.memory_limit = int64_t{300} << 20, .limits_itself = true});
  EXPECT_EQ(itself.out, "unlimited\n314572800\n");
  const auto limited = run_process(shell, {.memory_limit = int64_t{300} << 20});
  EXPECT_EQ(limited.out, "307200\n\n");
}

}  // namespace
}  // namespace reprise
