#include "fake_cost_source.h"
#include "support.h"

namespace reprise {
namespace {

using testing::cut;
using testing::FakeCostSource;
using testing::kMiB;
using testing::kStages;
using testing::request_for;
using testing::Window;
using testing::window_of;

TEST(PlannerGraph, CudaGraphsCountTowardsThePeak) {
  for (const GraphMode mode : {GraphMode::kAuto, GraphMode::kOn}) {
    int with = 0, without = 0;
    for (const int64_t global : {1, 12}) {
      for (int64_t mib = 48; mib < 108; ++mib) {
        FakeCostSource costs;
        costs.set_graph(mode);
        costs.truth = FakeCostSource::sum_ms;
        costs.faster_with_graph = 3;
        const int64_t memory = mib * kMiB;
        const PlanResult result = make_plan(request_for(global, memory), costs);
        // The schedule with the lowest peak of each size.
        bool graph_fits = false, fits = false;
        for (int64_t b = 1; b <= global; ++b) {
          for (unsigned bits = 0; bits < (1U << (kStages - 1)); ++bits) {
            const Schedule schedule = cut(bits);
            graph_fits |= window_of(global, b, schedule, true).peak <= memory;
            fits |= window_of(global, b, schedule).peak <= memory;
          }
        }
        if (mode == GraphMode::kOn) fits = graph_fits;
        // Segments do not cover all schedules.
        EXPECT_TRUE(result.feasible || !fits) << to_text(mode) << " " << mib;
        if (!result.feasible) continue;
        const Plan& plan = result.plan;
        const Window window =
            window_of(global, plan.micro_batch, plan.schedule, plan.graph);
        EXPECT_EQ(plan.peak_bytes, window.peak) << to_text(mode) << " " << mib;
        EXPECT_LE(plan.peak_bytes, memory);
        const PeakReport& peak = plan.peak;
        EXPECT_EQ(peak.parameters + peak.gradients + peak.optimizer +
                      peak.data + peak.kept + peak.in_flight + peak.workspace,
                  plan.peak_bytes);
        // Three times as fast, which outweighs any recomputation here.
        EXPECT_TRUE(plan.graph || !graph_fits) << global << " " << mib;
        (plan.graph ? with : without) += 1;
      }
    }
    EXPECT_GT(with, 0) << to_text(mode);
    EXPECT_EQ(without > 0, mode == GraphMode::kAuto);
  }
}

TEST(PlannerGraph, ACudaGraphWithoutGainNeverSlowsThePlan) {
  FakeCostSource costs;
  costs.set_graph(GraphMode::kAuto);
  costs.truth = FakeCostSource::sum_ms;
  FakeCostSource plain;
  plain.truth = FakeCostSource::sum_ms;
  for (int64_t mib = 66; mib < 130; mib += 2) {
    const auto request = request_for(8, mib * kMiB);
    const PlanResult result = make_plan(request, costs);
    const PlanResult expected = make_plan(request, plain);
    ASSERT_EQ(result.feasible, expected.feasible) << mib;
    if (!result.feasible) continue;
    EXPECT_LE(result.plan.step_ms, expected.plan.step_ms * (1 + 1e-9)) << mib;
  }
}

TEST(PlannerGraph, LaunchesDoNotCountInACudaGraph) {
  FakeCostSource costs;
  costs.set_graph(GraphMode::kAuto);
  costs.change = [](Precision, SizeCosts& size) {
    for (StageCosts& stage : size.chain_costs.stages) {
      // Launches of a variant are cheap, but its work on the device is not.
      KeptRunCosts variant = stage;
      variant.saved_bytes /= 4;
      variant.backward_ms *= 3;
      stage.variants = {variant};
      stage.forward_launch_ms = stage.backward_launch_ms =
          10 * (stage.forward_ms + stage.backward_ms);
    }
  };
  const PlanRequest request = request_for(2, 1024 * kMiB);
  const PlanResult result = make_plan(request, costs);
  ASSERT_TRUE(result.feasible);
  EXPECT_TRUE(result.plan.graph);
  FakeCostSource alone;  // without launches and variants
  const PlanResult expected = make_plan(request, alone);
  EXPECT_NEAR(result.plan.step_ms, expected.plan.step_ms,
              0.01 * expected.plan.step_ms);
  costs.set_graph(GraphMode::kOff);
  EXPECT_GT(make_plan(request, costs).plan.step_ms, 1.5 * result.plan.step_ms);
}

TEST(PlannerGraph, BatchesArePreparedBesideTheMemoryOfACudaGraph) {
  const auto peak_of = [](int64_t preparing) {
    FakeCostSource costs;
    costs.set_graph(GraphMode::kOn);
    costs.change = [preparing](Precision, SizeCosts& size) {
      size.prepare_bytes = size.data_bytes + preparing;
    };
    const PlanResult result = make_plan(request_for(2, 1024 * kMiB), costs);
    EXPECT_TRUE(result.feasible && result.plan.graph);
    return result.plan.peak_bytes;
  };
  // The temporaries of an update take 2 MiB, at another time.
  EXPECT_EQ(peak_of(kMiB), peak_of(0));
  EXPECT_EQ(peak_of(50 * kMiB), peak_of(0) + 48 * kMiB);
}

}  // namespace
}  // namespace reprise
