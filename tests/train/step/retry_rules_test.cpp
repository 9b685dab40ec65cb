// Tests of OomRetry in isolation; oom_retry_test.cpp tests whole trainings.
#include "support.h"
#include "train/step/oom_retry.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace reprise::detail {
namespace {

[[noreturn]] void run_out() {
  TORCH_CHECK(false, "DefaultCPUAllocator: can't allocate memory: 1 byte");
}

/// Records the names of calls in order.
struct Calls {
  std::vector<std::string> list;
  OomRetry retry{c10::Device(c10::kCPU),
                 [this](const std::string&) { list.push_back("warn"); },
                 [this] { list.push_back("release"); }};
  OomRetry::Recovery recovery{.drop = [this] { list.push_back("drop"); },
                              .restore = [this] { list.push_back("restore"); },
                              .agree = {}};
};

TEST(RetryRules, RestoresBeforeTheNextAttempt) {
  Calls calls;
  int failures = 1;
  calls.retry.run(
      "work",
      [&] {
        calls.list.push_back("body");
        if (failures-- > 0) run_out();
      },
      calls.recovery);
  EXPECT_EQ(calls.list, (std::vector<std::string>{"body", "drop", "release",
                                                  "warn", "restore", "body"}));
}

TEST(RetryRules, CountsAFailureInRestore) {
  Calls calls;
  int restores = 0;
  calls.recovery.restore = [&] {
    if (++restores < 3) run_out();
  };
  int bodies = 0;
  calls.retry.run(
      "work",
      [&] {
        if (++bodies == 1) run_out();
      },
      calls.recovery);
  EXPECT_EQ(restores, 3);
  EXPECT_EQ(bodies, 2);
}

TEST(RetryRules, ThrowsAfterTheLastFailure) {
  Calls calls;
  int bodies = 0;
  const auto work = [&] {
    ++bodies;
    run_out();
  };
  EXPECT_THROW(calls.retry.run("work", work, calls.recovery), RetriesExhausted);
  EXPECT_EQ(bodies, OomRetry::kMaxFailures);
}

TEST(RetryRules, PropagatesOtherErrors) {
  Calls calls;
  EXPECT_THROW(calls.retry.run("work", [] { TORCH_CHECK(false, "other"); }),
               c10::Error);
  EXPECT_TRUE(calls.list.empty());
}

TEST(RetryRules, RepeatsOnAllRanksIfOneFails) {
  // The first attempt succeeds on this rank but fails on another one.
  Calls calls;
  int attempts = 0;
  calls.recovery.agree = [&](bool failed) {
    EXPECT_FALSE(failed);
    return attempts == 1;
  };
  calls.retry.run(
      "work", [&] { ++attempts; }, calls.recovery);
  EXPECT_EQ(attempts, 2);
  // The attempt did not fail on this rank, so there is nothing to release.
  EXPECT_EQ(calls.list, (std::vector<std::string>{"restore", "warn"}));
}

TEST(RetryRules, ToleratesAFailureOnAnotherRank) {
  Calls calls;
  int attempts = 0;
  std::vector<bool> failed;
  calls.recovery.agree = [&](bool here) {
    failed.push_back(here);
    return here;
  };
  calls.retry.run(
      "work",
      [&] {
        if (++attempts == 1) throw FailedOnAnotherRank();
      },
      calls.recovery);
  EXPECT_EQ(failed, (std::vector<bool>{true, false}));
}

}  // namespace
}  // namespace reprise::detail
