// Which micro-batch sizes the planner measures, observed through make_plan().
#include "fake_cost_source.h"
#include "support.h"

#include <reprise/plan/planner.h>

namespace reprise {
namespace {

using testing::cut;
using testing::error_of;
using testing::FakeCostSource;
using testing::kMiB;
using testing::kStages;
using testing::request_for;
using testing::Window;
using testing::window_of;

/// Not all of many sizes are solved, but the best one is found.
TEST(SizeSearch, FindsTheBestOfManySizesWithFewMeasurements) {
  for (const int64_t global : {400, 1000}) {
    for (const int64_t memory : {90 * kMiB, 250 * kMiB, 900 * kMiB}) {
      FakeCostSource costs;
      PlanRequest request = request_for(global, memory);
      request.explain = false;
      const PlanResult result = make_plan(request, costs);
      double best = 0;
      for (int64_t b = 1; b <= global; ++b) {
        for (unsigned bits = 0; bits < (1U << (kStages - 1)); ++bits) {
          const Window window = window_of(global, b, cut(bits));
          if (window.peak > memory) continue;
          if (best == 0 || window.ms < best) best = window.ms;
        }
      }
      ASSERT_TRUE(result.feasible);
      EXPECT_LE(result.plan.step_ms, best * (1 + 1e-9))
          << global << " " << memory << " " << result.plan.micro_batch;
      EXPECT_EQ(costs.asked.count(result.plan.micro_batch), 1u);
      EXPECT_LT(costs.asked.size(), 14u);
    }
  }
}

TEST(SizeSearch, MeasuresOnlyTheRequestedPrecisions) {
  for (const int64_t mib : {10, 58, 70, 2000}) {
    FakeCostSource costs;
    make_plan(request_for(16, mib * kMiB), costs);
    EXPECT_TRUE(costs.profile(Precision::kBf16).sizes.empty()) << mib;
  }
}

TEST(SizeSearch, StopsMeasuringAPrecisionThatIsMuchSlower) {
  FakeCostSource costs;
  costs.change = [](Precision precision, SizeCosts& size) {
    if (precision != Precision::kBf16) return;
    for (auto& stage : size.chain_costs.stages) {
      stage.forward_ms *= 6;
      stage.backward_ms *= 6;
    }
  };
  PlanRequest request = request_for(64, 200 * kMiB);
  request.precisions = {Precision::kFp32, Precision::kBf16};
  EXPECT_EQ(make_plan(request, costs).plan.precision, Precision::kFp32);
  EXPECT_EQ(costs.profile(Precision::kBf16).sizes.size(), 1u);
  EXPECT_GT(costs.profile(Precision::kFp32).sizes.size(), 1u);
  // The ratio increases with the size, from two to three.
  FakeCostSource rising;
  rising.change = [](Precision precision, SizeCosts& size) {
    if (precision != Precision::kBf16) return;
    for (auto& stage : size.chain_costs.stages) {
      stage.forward_ms *= size.micro_batch == 1 ? 2 : 3;
      stage.backward_ms *= size.micro_batch == 1 ? 2 : 3;
    }
  };
  EXPECT_EQ(make_plan(request, rising).plan.precision, Precision::kFp32);
  EXPECT_EQ(rising.profile(Precision::kBf16).sizes.size(), 2u);
  // The slow precision is measured if nothing else fits.
  int only = 0;
  request.micro_batch = 16;  // else the update determines the minimum of both
  for (request.memory = 60 * kMiB; request.memory < 260 * kMiB;
       request.memory += 4 * kMiB) {
    FakeCostSource one, quick, slow;
    slow.change = costs.change;
    const bool fits = make_plan(request, quick).feasible;
    EXPECT_EQ(make_plan(request, slow).feasible, fits) << request.memory;
    PlanRequest first = request;
    first.precisions = {Precision::kFp32};
    only += fits && !make_plan(first, one).feasible;
  }
  EXPECT_GT(only, 0);
}

/// By extrapolation the stage itself does not fit, but its variant does.
TEST(SizeSearch, MeasuresASizeThatFitsOnlyWithAVariant) {
  FakeCostSource costs;
  costs.change = [](Precision, SizeCosts& size) {
    StageCosts& stage = size.chain_costs.stages[2];
    StageCosts::Variant variant = stage;
    variant.forward_ms += 1;
    stage.saved_bytes = 100 * variant.saved_bytes;
    stage.variants.push_back(variant);
  };
  for (const int64_t b : {1, 2, 4}) costs.measure(Precision::kFp32, b);
  PlanRequest request = request_for(8, 200 * kMiB);
  request.micro_batch = 8;
  const PlanResult result = make_plan(request, costs);
  ASSERT_TRUE(result.feasible);
  EXPECT_TRUE(costs.profile(Precision::kFp32).measured(8));
}

TEST(SizeSearch, ExcludesSizesThatRunOutOfMemory) {
  FakeCostSource costs(/*room=*/4);
  const PlanResult result = make_plan(request_for(64, 0), costs);
  EXPECT_TRUE(result.feasible);
  EXPECT_LE(result.plan.micro_batch, 4);
}

TEST(SizeSearch, SkipsSizesThatTheModelCannotRun) {
  for (int64_t global = 2; global < 20; ++global) {
    FakeCostSource costs;
    costs.smallest = 2;
    const PlanResult result = make_plan(request_for(global, 1), costs);
    EXPECT_GE(result.plan.micro_batch, 2) << global;
    EXPECT_GE(result.plan.last_micro_batch, 2) << global;
  }
  FakeCostSource costs;
  costs.smallest = 5;
  EXPECT_NE(error_of([&] {
              make_plan(request_for(4, 0), costs);
            }).find("as BatchNorm with one value"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
