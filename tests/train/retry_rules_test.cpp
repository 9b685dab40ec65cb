// The rules of OomRetry by itself; oom_retry_test.cpp has whole trainings.
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

/// Calls in their order, by name.
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

TEST(RetryRules, AFailureInRestoreCountsAsOne) {
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

TEST(RetryRules, GivesUpAfterTheLastFailure) {
  Calls calls;
  int bodies = 0;
  const auto work = [&] {
    ++bodies;
    run_out();
  };
  EXPECT_THROW(calls.retry.run("work", work, calls.recovery), RetriesExhausted);
  EXPECT_EQ(bodies, OomRetry::kMaxFailures);
}

TEST(RetryRules, OtherErrorsPropagateAtOnce) {
  Calls calls;
  EXPECT_THROW(calls.retry.run("work", [] { TORCH_CHECK(false, "other"); }),
               c10::Error);
  EXPECT_TRUE(calls.list.empty());
}

TEST(RetryRules, AllRanksRepeatWhatFailedOnOne) {
  // This rank succeeds at first, but another one does not.
  Calls calls;
  int attempts = 0;
  calls.recovery.agree = [&](bool failed) {
    EXPECT_FALSE(failed);
    return attempts == 1;
  };
  calls.retry.run(
      "work", [&] { ++attempts; }, calls.recovery);
  EXPECT_EQ(attempts, 2);
  // Its own attempt had not failed: there is nothing to release.
  EXPECT_EQ(calls.list, (std::vector<std::string>{"restore", "warn"}));
}

TEST(RetryRules, AFailureElsewhereIsNoErrorHere) {
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
