#include "train/loop/time_audit.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <chrono>
#include <thread>

namespace reprise::detail {
namespace {

constexpr TimeAudit::Usage kBusy{.user_s = 9.9, .system_s = 0.1};

TimeAudit::Finding steady(double seconds = 10) {
  return {seconds, 0, 0, torch::kCPU};
}

std::string only(const std::vector<std::string>& doubts) {
  EXPECT_EQ(doubts.size(), 1U);
  return doubts.size() == 1 ? doubts[0] : "";
}

TEST(TimeAudit, FindsNothingInAnUndisturbedTraining) {
  EXPECT_TRUE(time_doubts(kBusy, steady()).empty());
}

TEST(TimeAudit, NamesEachReasonWithItsShare) {
  auto waiting = steady();
  waiting.waited_s = 4.3;
  EXPECT_NE(only(time_doubts(kBusy, waiting))
                .find("43 % of it was spent "
                      "waiting for data"),
            std::string::npos);

  EXPECT_NE(only(time_doubts({.user_s = 4, .system_s = 6}, steady()))
                .find("60 % of the processor time was the kernel's"),
            std::string::npos);

  auto queued = kBusy;
  queued.queued_s = 3.0;
  EXPECT_NE(only(time_doubts(queued, steady())).find("30 %"),
            std::string::npos);

  auto denormal = steady();
  denormal.denormal_share = 0.5;
  EXPECT_NE(only(time_doubts(kBusy, denormal)).find("50 % of the gradients'"),
            std::string::npos);
  // Denormal numbers do not slow down a GPU.
  denormal.device = torch::kCUDA;
  EXPECT_TRUE(time_doubts(kBusy, denormal).empty());
}

TEST(TimeAudit, IgnoresShortTimes) {
  auto waiting = steady(0.1);
  waiting.waited_s = 0.1;
  EXPECT_TRUE(time_doubts(kBusy, waiting).empty());
}

TEST(TimeAudit, IgnoresTimeBeforeTheSteadyPart) {
  TimeAudit audit;
  EXPECT_TRUE(audit.doubts({10, 9, 0, torch::kCPU}).empty());
  audit.start(5, 4);
  // Four of the first five seconds were spent waiting, and none since.
  EXPECT_TRUE(audit.doubts({10, 4, 0, torch::kCPU}).empty());
  EXPECT_FALSE(audit.doubts({10, 7, 0, torch::kCPU}).empty());
}

TEST(TimeAudit, MeasuresTheSystemTimeOfThisProcess) {
  TimeAudit audit;
  audit.start(0, 0);
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
  bool found = false;
  for (const auto& doubt : audit.doubts({0.3, 0, 0, torch::kCPU})) {
    found = found || doubt.find("the kernel's") != std::string::npos;
  }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace reprise::detail
