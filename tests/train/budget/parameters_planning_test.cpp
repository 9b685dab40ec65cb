// Plans of trainings that may keep their parameters in host memory. On the CPU,
// HostTensorsOnCpu stands for the host.
#include "heavy_mlp.h"
#include "memory/host_tensors.h"

namespace reprise {
namespace {

using detail::HostTensorsOnCpu;
using testing::device;
using testing::expect_same;
using testing::heavy_mlp;
using testing::kHostChunk;
using testing::kHostLimit;
using testing::OwnCache;
using testing::quick_plan;
using testing::run;
using testing::Warnings;

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
      config.resolve();
      const PlanMeasurement measured =
          measure_plan(config, result.plan, 0, /*windows=*/2);
      EXPECT_NEAR(double(result.plan.peak_bytes) / double(measured.peak_bytes),
                  1, 0.03)
          << what;
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

    TrainConfig limited = config;
    limited.memory_limit = (on_host + moved) / 2;
    const PlanResult plan =
        quick_plan(config, StatePlace::kAuto, limited.memory_limit);
    EXPECT_TRUE(plan.feasible);
    EXPECT_EQ(plan.plan.state, StatePlace::kHostAll);
    EXPECT_NE(to_text(plan).find("of parameters, gradients and optimizer"),
              std::string::npos);
    EXPECT_EQ(plan_from_json(to_json(plan.plan), plan.plan.schedule.stages()),
              plan.plan);

    Warnings warnings;
    const auto tight = run(limited, {}, &warnings);
    expect_same(tight, run(config), "within a budget");
    EXPECT_LE(tight.result.summary.peak_bytes, limited.memory_limit);
    EXPECT_TRUE(warnings.list.empty());
    ASSERT_TRUE(tight.result.summary.predicted.has_value());
    EXPECT_NEAR(double(tight.result.summary.predicted->peak_bytes) /
                    double(tight.result.summary.peak_bytes),
                1, 0.03);
  }
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
