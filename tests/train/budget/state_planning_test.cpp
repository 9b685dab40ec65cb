// Plans of trainings whose optimizer may keep its state in host memory. On the CPU,
// HostTensorsOnCpu stands for the host.
#include "heavy_mlp.h"
#include "memory/host_tensors.h"
#include "plans.h"
#include "train/runs.h"

#include <reprise/train/planning.h>

#include <cstdlib>

namespace reprise {
namespace {

using detail::HostTensorsOnCpu;
using testing::device;
using testing::expect_predicted_peak;
using testing::expect_trains_within;
using testing::heavy_mlp;
using testing::kHostChunk;
using testing::kHostLimit;
using testing::OwnCache;
using testing::quick_plan;

TEST(StatePlanning, PredictsPeaks) {
  if (device().is_cuda()) GTEST_SKIP() << "chunks are larger there";
  const OwnCache cache;
  const HostTensorsOnCpu host(kHostLimit, kHostChunk);
  for (const UpdateMode update : {UpdateMode::kAfter, UpdateMode::kBackward}) {
    for (const char* optimizer : {"adamw", "adafactor", "adamw8bit"}) {
      TrainConfig config = heavy_mlp();
      config.update = update;
      config.optimizer.name = optimizer;
      const PlanResult result = quick_plan(config, StatePlace::kHost, 0, "all");
      const std::string what = optimizer + to_text(update);
      EXPECT_EQ(result.plan.state, StatePlace::kHost) << what;
      EXPECT_GT(result.plan.host_state.optimizer, 0) << what;
      EXPECT_LT(result.plan.peak.optimizer, 200'000) << what;  // tables
      expect_predicted_peak(config, result.plan, what);
    }
  }
}

TEST(StatePlanning, UsesTheHostIfOnlyThatFits) {
  if (device().is_cuda()) GTEST_SKIP() << "chunks are larger there";
  const OwnCache cache;
  const HostTensorsOnCpu host(kHostLimit, kHostChunk);
  const TrainConfig config = heavy_mlp();
  const auto smallest = [&](StatePlace place) {
    return quick_plan(config, place, 1).smallest_bytes;
  };
  const int64_t resident = smallest(StatePlace::kDevice);
  const int64_t streamed = smallest(StatePlace::kHost);
  ASSERT_LT(streamed, resident * 3 / 4);
  // heavy_mlp() excludes updates in the backward, and so parameters in host memory.
  EXPECT_EQ(smallest(StatePlace::kAuto), streamed);

  const int64_t between = (resident + streamed) / 2;
  const PlanResult plan = quick_plan(config, StatePlace::kAuto, between);
  EXPECT_TRUE(plan.feasible);
  EXPECT_EQ(plan.plan.state, StatePlace::kHost);
  EXPECT_NE(to_text(plan).find("of optimizer state in host memory"),
            std::string::npos);
  EXPECT_NE(describe(plan.plan).find("of optimizer state on the host"),
            std::string::npos);
  EXPECT_EQ(plan_from_json(to_json(plan.plan), plan.plan.schedule.stages()),
            plan.plan);
  EXPECT_EQ(quick_plan(config, StatePlace::kAuto, 4 * resident).plan.state,
            StatePlace::kDevice);
  EXPECT_FALSE(quick_plan(config, StatePlace::kDevice, between).feasible);

  EXPECT_GT(expect_trains_within(config, between).host_state_bytes, 0);
}

/// Measured peaks of trials include the part of the state that stays on the device, if it exists.
TEST(StatePlanning, TriesPlansWithAPartOnTheDevice) {
  if (device().is_cuda()) GTEST_SKIP() << "chunks are larger there";
  const OwnCache cache;
  const HostTensorsOnCpu host(kHostLimit, kHostChunk);
  for (const double share : {0.25, 0.75}) {
    TrainConfig config = heavy_mlp();
    config.state = StatePlace::kHost;
    config.host_share = share;
    config.resolve();
    for (const bool cached : {false, true}) {
      PlanRequest request = request_for(config, 0);
      request.strategy = cached ? "all" : "none";  // one that was not tried
      const Plan plan = plan_training(config, request).plan;
      EXPECT_EQ(plan.host_share, share);
      EXPECT_GT(plan.peak.optimizer, 100'000);
      EXPECT_LT(std::abs(plan.extra_bytes), plan.peak_bytes / 50) << share;
      expect_predicted_peak(config, plan, to_text(plan.state));
    }
  }
}

TEST(StatePlanning, PlansWithoutAHostThatHasNoRoom) {
  if (device().is_cuda()) GTEST_SKIP() << "there is room";
  const OwnCache cache;
  const HostTensorsOnCpu host(/*limit_bytes=*/1000, kHostChunk);
  const TrainConfig config = heavy_mlp();
  const int64_t resident =
      quick_plan(config, StatePlace::kDevice, 1).smallest_bytes;
  EXPECT_EQ(quick_plan(config, StatePlace::kAuto, 1).smallest_bytes, resident);
  const PlanResult forced = quick_plan(config, StatePlace::kHost, 2 * resident);
  EXPECT_TRUE(forced.feasible);
  EXPECT_EQ(forced.plan.state, StatePlace::kDevice);
}

}  // namespace
}  // namespace reprise
