#include "fake_cost_source.h"

#include <reprise/plan/planner.h>

#include <gtest/gtest.h>

namespace reprise {
namespace {

using testing::FakeCostSource;
using testing::kMiB;
using testing::request_for;
using testing::window_of;

constexpr int64_t kGlobal = 8;

PlanResult plan_within(int64_t budget, FakeCostSource& costs) {
  costs.truth = FakeCostSource::sum_ms;
  return make_plan(request_for(kGlobal, budget), costs);
}

int64_t recomputed(const Schedule& schedule) {
  return schedule.total_runs() - schedule.stages();
}

/// An error that is the same for all schedules changes the budget.
TEST(PlannerTrials, AnErrorOfThePredictionChangesTheBudget) {
  for (const int64_t extra : {8 * kMiB, -8 * kMiB}) {
    for (int64_t budget = 66 * kMiB; budget < 200 * kMiB; budget += 9 * kMiB) {
      FakeCostSource costs, exact;
      costs.extra = [&](const Schedule&) { return extra; };
      const PlanResult result = plan_within(budget, costs);
      const PlanResult expected = plan_within(budget - extra, exact);
      ASSERT_EQ(result.feasible, expected.feasible);
      EXPECT_EQ(result.plan.step_ms, expected.plan.step_ms) << budget;
      EXPECT_LE(result.plan.peak_bytes, budget);
      EXPECT_EQ(result.plan.extra_bytes, extra);
    }
  }
}

/// Whatever the errors are, the plan's peak is the measured one, and within the budget.
TEST(PlannerTrials, PlansFitAsMeasured) {
  int corrected = 0;
  for (const int64_t unit : {kMiB, 3 * kMiB, -2 * kMiB}) {
    for (int64_t budget = 66 * kMiB; budget < 200 * kMiB; budget += 9 * kMiB) {
      FakeCostSource costs;
      costs.extra = [&](const Schedule& schedule) {
        return unit * recomputed(schedule);
      };
      const PlanResult result = plan_within(budget, costs);
      if (!result.feasible) continue;
      const Plan& plan = result.plan;
      const int64_t extra = unit * recomputed(plan.schedule);
      EXPECT_LE(plan.peak_bytes, budget);
      EXPECT_EQ(
          plan.peak_bytes,
          window_of(kGlobal, plan.micro_batch, plan.schedule).peak + extra);
      const PeakReport& peak = plan.peak;
      EXPECT_EQ(peak.parameters + peak.gradients + peak.optimizer + peak.data +
                    peak.kept + peak.in_flight + peak.workspace,
                plan.peak_bytes);
      corrected += extra != 0 ? 1 : 0;
    }
  }
  EXPECT_GT(corrected, 10);
}

TEST(PlannerTrials, PlansThatAreBeatenAreNotTried) {
  const auto tries_with = [](double rival_ms) {
    FakeCostSource costs;
    costs.truth = FakeCostSource::sum_ms;
    PlanRequest request = request_for(kGlobal, 100 * kMiB);
    request.rival_ms = rival_ms;
    EXPECT_TRUE(make_plan(request, costs).feasible);
    return costs.tries;
  };
  FakeCostSource costs;
  const double fastest = plan_within(100 * kMiB, costs).plan.step_ms;
  EXPECT_GT(costs.tries, 0);
  EXPECT_EQ(tries_with(0), costs.tries);
  EXPECT_EQ(tries_with(fastest), costs.tries);
  EXPECT_EQ(tries_with(fastest / 2), 0);
}

/// Errors are remembered with the trials.
TEST(PlannerTrials, TriesNothingOnASecondRequest) {
  FakeCostSource costs;
  costs.extra = [](const Schedule& schedule) {
    return 3 * kMiB * recomputed(schedule);
  };
  const Plan first = plan_within(100 * kMiB, costs).plan;
  const int tries = costs.tries;
  EXPECT_GT(tries, 0);
  EXPECT_LE(tries, 30);
  EXPECT_EQ(plan_within(100 * kMiB, costs).plan, first);
  EXPECT_EQ(costs.tries, tries);
}

}  // namespace
}  // namespace reprise
