#include "fake_cost_source.h"
#include "support.h"

#include <reprise/plan/planner.h>
#include <reprise/recompute/strategy.h>

#include <random>
#include <set>

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

TEST(Planner, FindsTheBestOfAllSizesAndSchedules) {
  for (const int64_t global : {1, 7, 12, 32}) {
    for (const int64_t memory :
         {70 * kMiB, 90 * kMiB, 140 * kMiB, 250 * kMiB, 2000 * kMiB}) {
      FakeCostSource costs;
      const PlanResult result = make_plan(request_for(global, memory), costs);
      double best = 0;
      for (int64_t b = 1; b <= global; ++b) {
        // All divisions into segments, including none and all.
        for (unsigned bits = 0; bits < (1U << (kStages - 1)); ++bits) {
          const Window window = window_of(global, b, cut(bits));
          if (window.peak <= memory && (best == 0 || window.ms < best)) {
            best = window.ms;
          }
        }
      }
      ASSERT_EQ(result.feasible, best > 0) << global << " " << memory;
      if (!result.feasible) continue;
      EXPECT_LE(result.plan.step_ms, best * (1 + 1e-9))
          << global << " " << memory;
      const Window window =
          window_of(global, result.plan.micro_batch, result.plan.schedule);
      EXPECT_EQ(result.plan.peak_bytes, window.peak);
      EXPECT_NEAR(result.plan.step_ms, window.ms, 1e-6);
      EXPECT_LE(window.peak, memory);
      EXPECT_EQ(costs.asked.count(result.plan.micro_batch), 1u);
    }
  }
}

/// Interpolation between measured sizes may report a size to fit that does not.
TEST(Planner, ListsOnlyMeasuredSizes) {
  for (const int64_t mib : {70, 90, 140, 250, 2000}) {
    FakeCostSource costs;
    const PlanResult result = make_plan(request_for(32, mib * kMiB), costs);
    ASSERT_TRUE(result.feasible);
    for (const Plan& plan : result.alternatives) {
      EXPECT_EQ(costs.asked.count(plan.micro_batch), 1u) << mib;
      EXPECT_LE(plan.peak_bytes, mib * kMiB);
    }
    for (const FrontierPoint& point : result.frontier) {
      EXPECT_EQ(costs.asked.count(point.micro_batch), 1u) << mib;
    }
  }
}

TEST(Planner, MoreMemoryIsNeverSlower) {
  double last = 1e30;
  for (int64_t mib = 60; mib < 400; mib += 5) {
    FakeCostSource costs;
    const PlanResult result = make_plan(request_for(16, mib * kMiB), costs);
    if (!result.feasible) {
      EXPECT_EQ(last, 1e30) << "fits into less, but not into " << mib;
      EXPECT_GT(result.smallest_bytes, mib * kMiB);
      continue;
    }
    EXPECT_LE(result.plan.step_ms, last + 1e-9) << mib;
    last = result.plan.step_ms;
  }
  EXPECT_LT(last, 1e30);
}

TEST(Planner, ReturnsTheSmallestPlanIfNothingFits) {
  FakeCostSource costs;
  const PlanResult result = make_plan(request_for(8, 10 * kMiB), costs);
  EXPECT_FALSE(result.feasible);
  EXPECT_EQ(result.plan.micro_batch, 1);
  EXPECT_FALSE(result.peak_reductions.empty());
  FakeCostSource again;
  const PlanResult fits =
      make_plan(request_for(8, result.smallest_bytes), again);
  EXPECT_TRUE(fits.feasible);
  FakeCostSource less;
  EXPECT_FALSE(
      make_plan(request_for(8, result.smallest_bytes - kMiB / 10), less)
          .feasible);
}

TEST(Planner, UsesTheRequestedMicroBatchAndStrategy) {
  FakeCostSource costs;
  PlanRequest request = request_for(10, 0);
  request.micro_batch = 3;
  request.strategy = "every:2";
  const Plan plan = make_plan(request, costs).plan;
  EXPECT_EQ(plan.micro_batch, 3);
  EXPECT_EQ(plan.accumulate, 4);
  EXPECT_EQ(plan.last_micro_batch, 1);
  EXPECT_EQ(plan.schedule.to_text(),
            make_schedule("every:2", kStages).to_text());
}

TEST(Planner, ChoosesTheFastestPrecision) {
  FakeCostSource costs;
  PlanRequest request = request_for(8, 80 * kMiB);
  request.precisions = {Precision::kFp32, Precision::kBf16};
  const PlanResult both = make_plan(request, costs);
  EXPECT_EQ(both.plan.precision,
            Precision::kBf16);  // as fast with half of the memory
}

TEST(Planner, LeavesTheMarginFree) {
  FakeCostSource costs;
  PlanRequest request = request_for(16, 200 * kMiB);
  request.margin = 0.1;
  const PlanResult result = make_plan(request, costs);
  ASSERT_TRUE(result.feasible);
  // Of what is not weights or optimizer state.
  const FixedMemory fixed = costs.profile(Precision::kFp32).fixed;
  const int64_t exact = fixed.parameters + fixed.optimizer;
  ASSERT_GT(exact, 0);
  EXPECT_LE(result.plan.peak_bytes, 200 * kMiB - (200 * kMiB - exact) / 10);
  // The smallest budget is one in which a plan is found.
  request.memory = result.smallest_bytes;
  EXPECT_TRUE(make_plan(request, costs).feasible);
  request.memory = result.smallest_bytes - kMiB;
  EXPECT_FALSE(make_plan(request, costs).feasible);
}

TEST(Planner, ReportsTheCauseOfThePeak) {
  for (const int64_t mib : {70, 90, 140, 2000}) {
    FakeCostSource costs;
    const Plan plan = make_plan(request_for(16, mib * kMiB), costs).plan;
    const PeakReport& peak = plan.peak;
    EXPECT_EQ(peak.parameters + peak.gradients + peak.optimizer + peak.data +
                  peak.kept + peak.in_flight + peak.workspace,
              plan.peak_bytes)
        << mib;
    if (peak.phase != "update") {
      EXPECT_EQ(peak.stage_name, "s" + std::to_string(peak.stage));
    }
    EXPECT_GE(peak.in_flight, 0);
  }
}

TEST(Planner, FrontierDominatesTheReferences) {
  FakeCostSource costs;
  const PlanResult result = make_plan(request_for(16, 150 * kMiB), costs);
  ASSERT_GT(result.frontier.size(), 3u);
  for (size_t i = 1; i < result.frontier.size(); ++i) {
    EXPECT_GT(result.frontier[i].peak_bytes, result.frontier[i - 1].peak_bytes);
    EXPECT_LT(result.frontier[i].step_ms, result.frontier[i - 1].step_ms);
  }
  std::set<StrategyKind> kinds;
  for (const auto& point : result.references) {
    ASSERT_TRUE(point.strategy);
    kinds.insert(*point.strategy);
  }
  EXPECT_EQ(kinds,
            (std::set<StrategyKind>{StrategyKind::kNone, StrategyKind::kAll,
                                    StrategyKind::kSqrt}));
}

TEST(Planner, WithoutExplanationThePlanIsTheSame) {
  for (const int64_t mib : {10, 70, 140}) {
    FakeCostSource all, few;
    PlanRequest request = request_for(16, mib * kMiB);
    const PlanResult explained = make_plan(request, all);
    request.explain = false;
    const PlanResult result = make_plan(request, few);
    Plan expected = explained.plan;
    expected.peak.is_floor = false;  // part of the explanation
    EXPECT_EQ(to_json(result.plan), to_json(expected));
    EXPECT_TRUE(result.frontier.empty());
    EXPECT_TRUE(result.peak_reductions.empty());
    EXPECT_TRUE(few.profile(Precision::kBf16).sizes.empty());
  }
}

/// An arbitrary, but reproducible deviation from the predicted time.
std::optional<double> erratic(int64_t b, const Schedule& schedule) {
  std::mt19937 generator(
      static_cast<unsigned>(std::hash<std::string>()(schedule.to_text()) + b));
  return FakeCostSource::sum_ms(b, schedule) *
         (0.7 + (generator() % 1000) / 1250.0);
}

/// Every plan that is tried is slower than all predictions.
std::optional<double> disappointing(int64_t b, const Schedule& schedule) {
  return (10 + double(b % 3)) * FakeCostSource::sum_ms(b, schedule);
}

/// Returns the time of the fastest plan that fits of all that the source has
/// tried.
double fastest_tried(FakeCostSource& costs, const PlanRequest& request) {
  double best = 1e30;
  for (const auto& one : costs.profile(Precision::kFp32).tried) {
    const auto schedule = Schedule::parse("tried", kStages, one.schedule);
    const int64_t b = one.micro_batch;
    const Window window = window_of(request.global_batch, b, schedule);
    if (window.peak > request.memory) continue;
    const double ratio = one.ms / FakeCostSource::sum_ms(b, schedule);
    best = std::min(best, (window.ms - 3) * ratio + 3);
  }
  return best;
}

TEST(Planner, PredictsTheMeasuredTimeOfTriedPlans) {
  for (const int64_t global :
       {16, 10}) {  // the latter with a smaller last micro-batch
    FakeCostSource summed, tried;
    tried.truth = [](int64_t b, const Schedule& schedule) {
      return 1.25 * FakeCostSource::sum_ms(b, schedule);
    };
    PlanRequest request = request_for(global, 100 * kMiB);
    request.micro_batch = 4;
    const Plan a = make_plan(request, summed).plan;
    const Plan b = make_plan(request, tried).plan;
    EXPECT_EQ(tried.tries, 1);
    EXPECT_EQ(summed.tries, 0);
    EXPECT_EQ(a.schedule.to_text(), b.schedule.to_text());
    EXPECT_EQ(a.peak_bytes, b.peak_bytes);
    EXPECT_DOUBLE_EQ(b.micro_ms, 1.25 * a.micro_ms);
    EXPECT_NEAR(b.step_ms, 1.25 * (a.step_ms - 3) + 3, 1e-9);
  }
}

TEST(Planner, ReplacesAPlanThatIsSlowerThanPredicted) {
  FakeCostSource summed;
  const PlanRequest request = request_for(16, 90 * kMiB);
  for (int64_t b = 1; b <= 16; ++b) summed.measure(Precision::kFp32, b);
  const PlanResult before = make_plan(request, summed);
  ASSERT_GT(before.alternatives.size(), 1u);
  const Plan& second = before.alternatives[0];
  FakeCostSource costs;
  costs.truth = [&](int64_t b, const Schedule& schedule) {
    return (b == before.plan.micro_batch ? 2 : 1) *
           FakeCostSource::sum_ms(b, schedule);
  };
  const PlanResult after = make_plan(request, costs);
  EXPECT_EQ(costs.tries, 2);
  EXPECT_EQ(after.plan.micro_batch, second.micro_batch);
  EXPECT_EQ(after.plan.schedule.to_text(), second.schedule.to_text());
  EXPECT_NEAR(after.plan.step_ms, second.step_ms, 1e-9);
  EXPECT_LE(after.plan.peak_bytes, request.memory);
  // The first one is still listed, with its measured time.
  bool found = false;
  for (const Plan& plan : after.alternatives) {
    if (plan.micro_batch != before.plan.micro_batch) continue;
    EXPECT_NEAR(plan.step_ms, 2 * (before.plan.step_ms - 3) + 3, 1e-9);
    found = true;
  }
  EXPECT_TRUE(found);
}

TEST(Planner, TriesFewPlansAndNoneOnASecondRequest) {
  for (const int64_t mib : {70, 90, 140, 250, 2000}) {
    FakeCostSource costs;
    costs.truth = disappointing;
    const PlanRequest request = request_for(32, mib * kMiB);
    const PlanResult result = make_plan(request, costs);
    ASSERT_TRUE(result.feasible);
    EXPECT_GE(costs.tries, 2) << mib;
    EXPECT_LE(costs.tries, 4) << mib;
    EXPECT_NEAR(result.plan.step_ms, fastest_tried(costs, request), 1e-6);
    EXPECT_LE(result.plan.peak_bytes, request.memory);
    costs.tries = 0;
    costs.asked.clear();
    EXPECT_EQ(to_json(make_plan(request, costs)), to_json(result)) << mib;
    EXPECT_EQ(costs.tries, 0) << mib;
  }
}

TEST(Planner, MoreMemoryIsNeverSlowerThanAnEarlierResult) {
  for (unsigned seed = 0; seed < 4; ++seed) {
    FakeCostSource costs;
    costs.truth = erratic;
    std::vector<int64_t> budgets;
    for (int64_t mib = 62; mib < 300; mib += 14) budgets.push_back(mib * kMiB);
    if (seed > 0) {  // else in ascending order
      std::shuffle(budgets.begin(), budgets.end(), std::mt19937(seed));
    }
    std::map<int64_t, double> answers;
    for (const int64_t memory : budgets) {
      const PlanRequest request = request_for(16, memory);
      const PlanResult result = make_plan(request, costs);
      ASSERT_TRUE(result.feasible) << memory;
      EXPECT_LE(result.plan.peak_bytes, memory);
      EXPECT_NEAR(result.plan.step_ms, fastest_tried(costs, request), 1e-6);
      for (const auto& [less, ms] : answers) {
        if (less < memory) {
          EXPECT_LE(result.plan.step_ms, ms + 1e-9);
        }
      }
      answers[memory] = result.plan.step_ms;
    }
    // Once nothing new is tried, this holds in any order.
    double last = 1e30;
    for (int pass = 0; pass < 3; ++pass) {
      costs.tries = 0;
      last = 1e30;
      for (const auto& [memory, ms] : answers) {
        const Plan plan = make_plan(request_for(16, memory), costs).plan;
        EXPECT_LE(plan.step_ms, std::min(last, ms) + 1e-9);
        last = plan.step_ms;
      }
    }
    EXPECT_EQ(costs.tries, 0);
  }
}

TEST(Planner, PlanIsOnTheFrontier) {
  for (const auto& truth : {erratic, disappointing}) {
    FakeCostSource costs;
    costs.truth = truth;
    for (const int64_t mib : {62, 90, 140, 200, 2000}) {
      const PlanResult result = make_plan(request_for(16, mib * kMiB), costs);
      bool there = false;
      for (size_t i = 0; i < result.frontier.size(); ++i) {
        const FrontierPoint& point = result.frontier[i];
        there = there || (point.peak_bytes == result.plan.peak_bytes &&
                          point.step_ms == result.plan.step_ms);
        if (point.peak_bytes <= mib * kMiB) {
          EXPECT_GE(point.step_ms, result.plan.step_ms) << mib;
        }
        if (i == 0) continue;
        EXPECT_GT(point.peak_bytes, result.frontier[i - 1].peak_bytes);
        EXPECT_LT(point.step_ms, result.frontier[i - 1].step_ms);
      }
      EXPECT_TRUE(there) << mib;
    }
  }
}

/// Times measured on a busy machine are not compared with times measured on an
/// idle one.
TEST(Planner, TimesSimilarPlansAlternately) {
  const auto truth = [](int64_t b, const Schedule& schedule) {
    return FakeCostSource::sum_ms(b, schedule);
  };
  PlanRequest tight = request_for(16, 90 * kMiB);
  tight.micro_batch = 4;
  PlanRequest free = tight;
  free.memory = 2000 * kMiB;
  FakeCostSource quiet;
  quiet.truth = truth;
  const Plan right = make_plan(free, quiet).plan;
  EXPECT_EQ(right.schedule.total_runs(), kStages);

  FakeCostSource costs;
  costs.truth = truth;
  costs.compares = true;
  const Plan slow = make_plan(tight, costs).plan;
  ASSERT_GT(slow.schedule.total_runs(), kStages);
  costs.load = 2;
  const Plan plan = make_plan(free, costs).plan;
  EXPECT_EQ(plan.schedule.to_text(), right.schedule.to_text());
  EXPECT_NEAR(plan.micro_ms, 2 * right.micro_ms, 1e-9);
  // Times that were measured alternately are final: a second request compares
  // nothing.
  const int comparisons = costs.comparisons;
  EXPECT_GE(comparisons, 1);
  costs.load = 1;
  EXPECT_EQ(to_json(make_plan(free, costs).plan), to_json(plan));
  EXPECT_EQ(costs.comparisons, comparisons);
}

TEST(Planner, TriesOnlyTheRequestedStrategy) {
  FakeCostSource costs;
  costs.truth = erratic;
  make_plan(request_for(12, 0), costs);  // tries other strategies
  PlanRequest request = request_for(12, 0);
  request.strategy = "sqrt";
  const Plan plan = make_plan(request, costs).plan;
  const auto schedule = make_schedule("sqrt", kStages);
  EXPECT_EQ(plan.schedule.to_text(), schedule.to_text());
  EXPECT_DOUBLE_EQ(plan.micro_ms, *erratic(plan.micro_batch, schedule));
}

TEST(Planner, UsesThePredictionOfPlansThatCannotBeTried) {
  for (const int64_t mib : {70, 140, 2000}) {
    FakeCostSource summed, costs;
    int asked = 0;
    costs.truth = [&](int64_t, const Schedule&) -> std::optional<double> {
      ++asked;
      return std::nullopt;
    };
    const PlanRequest request = request_for(16, mib * kMiB);
    EXPECT_EQ(to_json(make_plan(request, summed)),
              to_json(make_plan(request, costs)));
    EXPECT_EQ(asked, 1);
  }
}

TEST(Planner, RejectsInvalidRequests) {
  FakeCostSource costs;
  const auto error = [&](const PlanRequest& request) {
    return error_of([&] { make_plan(request, costs); });
  };
  EXPECT_NE(
      error(request_for(0, 0)).find("expected a positive global batch, got 0"),
      std::string::npos);
  PlanRequest request = request_for(4, 0);
  request.micro_batch = 5;
  EXPECT_NE(error(request).find("between 0 and the global batch, 4, got 5"),
            std::string::npos);
  EXPECT_NE(error(request_for(4, -1)).find("expected a non-negative budget"),
            std::string::npos);
}

TEST(Planner, UpdatesInTheBackwardIfThatIsFaster) {
  for (const double part : {0.0, 1.0, 5.0}) {
    FakeCostSource costs;
    costs.set_update(UpdateMode::kAuto, part);
    const Plan one = make_plan(request_for(2, 1024 * kMiB), costs).plan;
    ASSERT_EQ(one.accumulate, 1);
    const double update = part > 0 ? std::min(part, 3.0) : 3.0;
    EXPECT_EQ(one.update == UpdateMode::kBackward, part == 1.0) << part;
    const double stages = FakeCostSource::sum_ms(2, one.schedule);
    EXPECT_NEAR(one.step_ms, stages + update, 1e-9) << part;
  }
}

}  // namespace
}  // namespace reprise
