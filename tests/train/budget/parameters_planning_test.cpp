// Plans of trainings that may keep their parameters in host memory. On the CPU,
// HostTensorsOnCpu stands for the host.
#include "heavy_mlp.h"
#include "memory/host_tensors.h"

namespace reprise {
namespace {

using detail::HostTensorsOnCpu;
using testing::device;
using testing::error_of;
using testing::expect_predicted_peak;
using testing::expect_same;
using testing::expect_trains_within;
using testing::heavy_mlp;
using testing::kHostChunk;
using testing::kHostLimit;
using testing::OwnCache;
using testing::quick_plan;
using testing::run;

TrainConfig movable_mlp(int64_t accumulate) {
  TrainConfig config = heavy_mlp();
  config.update = UpdateMode::kAuto;
  config.accumulate = accumulate;
  return config;
}

TEST(ParametersPlanning, PredictsPeaks) {
  if (device().is_cuda()) GTEST_SKIP() << "chunks are larger there";
  const OwnCache cache;
  const HostTensorsOnCpu host(kHostLimit, kHostChunk);
  for (const int64_t accumulate : {1, 3}) {
    for (const char* strategy : {"none", "all"}) {
      TrainConfig config = movable_mlp(accumulate);
      const PlanResult result =
          quick_plan(config, StatePlace::kHostAll, 0, strategy);
      const auto what = std::string(strategy) + std::to_string(accumulate);
      EXPECT_EQ(result.plan.state, StatePlace::kHostAll) << what;
      EXPECT_EQ(result.plan.update, UpdateMode::kBackward) << what;
      expect_predicted_peak(config, result.plan, what);
    }
  }
}

TEST(ParametersPlanning, UsesTheHostIfOnlyThatFits) {
  if (device().is_cuda()) GTEST_SKIP() << "chunks are larger there";
  const OwnCache cache;
  const HostTensorsOnCpu host(kHostLimit, kHostChunk);
  for (const int64_t accumulate : {1, 3}) {
    const TrainConfig config = movable_mlp(accumulate);
    const auto smallest = [&](StatePlace place) {
      return quick_plan(config, place, 1).smallest_bytes;
    };
    const int64_t on_host = smallest(StatePlace::kHost);
    const int64_t moved = smallest(StatePlace::kHostAll);
    ASSERT_LT(moved, on_host * 3 / 4);
    EXPECT_EQ(smallest(StatePlace::kAuto), moved);

    const int64_t between = (on_host + moved) / 2;
    const PlanResult plan = quick_plan(config, StatePlace::kAuto, between);
    EXPECT_TRUE(plan.feasible);
    EXPECT_EQ(plan.plan.state, StatePlace::kHostAll);
    EXPECT_NE(to_text(plan).find("of parameters, gradients and optimizer"),
              std::string::npos);
    EXPECT_EQ(plan_from_json(to_json(plan.plan), plan.plan.schedule.stages()),
              plan.plan);

    expect_trains_within(config, between);
  }
}

/// As with a limit for locked memory, which is known only when it is reached.
TEST(ParametersPlanning, PlansAgainIfTheHostGivesNoMemory) {
  if (device().is_cuda()) GTEST_SKIP() << "there is room";
  const OwnCache cache;
  const TrainConfig config = movable_mlp(3);
  int64_t resident = 0, moved = 0;
  {
    const HostTensorsOnCpu host(kHostLimit, kHostChunk);
    resident = quick_plan(config, StatePlace::kDevice, 1).smallest_bytes;
    moved = quick_plan(config, StatePlace::kHostAll, 1).smallest_bytes;
  }
  TrainConfig limited = config;
  limited.memory_limit = resident + resident / 10;
  for (const int count : {0, 1, 2, 3, 4, 5}) {
    const HostTensorsOnCpu host(kHostLimit, kHostChunk);
    HostTensorsOnCpu::fail_after(count);
    const auto got = run(limited);
    EXPECT_LE(got.result.summary.peak_bytes, limited.memory_limit) << count;
    expect_same(got, run(config), "allocations: " + std::to_string(count));
  }
  limited.memory_limit = (resident + moved) / 2;
  const HostTensorsOnCpu host(kHostLimit, kHostChunk);
  HostTensorsOnCpu::fail_after(0);
  EXPECT_NE(error_of([&] { run(limited); }).find("nothing fits into"),
            std::string::npos);
}

TEST(ParametersPlanning, FindsLargerModels) {
  if (device().is_cuda()) GTEST_SKIP() << "chunks are larger there";
  const OwnCache cache;
  const HostTensorsOnCpu host(/*limit_bytes=*/int64_t{64} << 20, kHostChunk);
  const TrainConfig config = movable_mlp(1);
  const int64_t memory =
      quick_plan(config, StatePlace::kDevice, 1).smallest_bytes;
  const auto largest = [&](StatePlace place) {
    TrainConfig given = config;
    given.state = place;
    given.resolve();
    PlanningOptions quick;
    quick.quick = true;
    return find_largest(given, LargestAxis::kDepth,
                        testing::request_for(given, memory), quick);
  };
  const Largest resident = largest(StatePlace::kDevice);
  const Largest moved = largest(StatePlace::kAuto);
  EXPECT_EQ(moved.plain, resident.plain);
  EXPECT_GE(resident.value, config.model_options.depth);
  // The host has room for 12 bytes per parameter of so many layers of 256 × 256.
  EXPECT_GE(moved.value, 3 * resident.value);
  EXPECT_LE(moved.value * 256 * 256 * 12, int64_t{64} << 20);
  ASSERT_TRUE(moved.plan.has_value());
  EXPECT_EQ(moved.plan->state, StatePlace::kHostAll);
  EXPECT_NE(to_text(moved).find("in host memory"), std::string::npos);
}

}  // namespace
}  // namespace reprise
