#include "plan/brute_force.h"
#include "plan/exact_schedules.h"
#include "plan/random_chains.h"
#include "support.h"

#include <reprise/plan/solver.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>

namespace reprise {
namespace {

using testing::BruteForce;
using testing::ChainKind;
using testing::ExactSchedules;
using testing::random_chain;
using testing::random_costs;

TEST(SolverExact, ReferenceEqualsBruteForce) {
  std::mt19937 random(11);
  size_t points = 0;
  for (int round = 0; round < 200; ++round) {
    const auto chain_costs =
        random_costs(random, {.stages = 1 + round % 6,
                              .max_bytes = round % 3 == 0 ? 2 : 6,
                              .variants = round % 2 == 0});
    const BruteForce truth(chain_costs, BruteForce::kInOrder);
    const ExactSchedules exact(chain_costs);
    ASSERT_EQ(exact.points().size(), truth.points().size());
    for (size_t i = 0; i < exact.points().size(); ++i) {
      const auto& theirs = truth.points()[truth.points().size() - 1 - i];
      ASSERT_EQ(exact.points()[i].bytes, theirs.peak_bytes);
      ASSERT_EQ(exact.points()[i].ms, theirs.time_ms);
    }
    points += exact.points().size();
  }
  std::cout << "equal at " << points << " points\n";
  EXPECT_GT(points, 500u);
}

/// Returns the maximum ratio of the solver's time to the optimum over all
/// budgets up to `max_budget` times the smallest one.
double worst_ratio(const ChainCosts& chain_costs, double max_budget = 8) {
  const Solver solver(chain_costs);
  const auto bytes_for = [&](double budget) {
    return static_cast<int64_t>(
        std::ceil(static_cast<double>(solver.smallest_bytes()) * budget));
  };
  const ExactSchedules exact(chain_costs, bytes_for(max_budget));
  EXPECT_EQ(solver.smallest_bytes(), exact.least_bytes());
  double worst = 1;
  for (const double budget : testing::compared_budgets()) {
    if (budget > max_budget) break;
    const auto ours = solver.solve(bytes_for(budget));
    if (!ours || ours->simulation.peak_bytes > bytes_for(budget)) {
      ADD_FAILURE() << "no schedule at " << budget;
      continue;
    }
    const double optimum = exact.time_ms(bytes_for(budget)).value();
    EXPECT_GE(ours->simulation.time_ms, optimum);
    worst = std::max(worst, ours->simulation.time_ms / optimum);
  }
  return worst;
}

// solver_bench --exact-chains compares more and longer chains.
TEST(SolverExact, WithinOnePercentAtEveryBudget) {
  std::mt19937 random(12);
  double worst = 1;
  for (int round = 0; round < 42; ++round) {
    constexpr ChainKind kKinds[] = {ChainKind::kUniform, ChainKind::kAlike,
                                    ChainKind::kFarApart};
    const int stages = 5 + 2 * round;
    const double ratio =
        worst_ratio(random_chain(random, kKinds[round % 3], stages));
    EXPECT_LE(ratio, 1.01) << stages << " stages";
    worst = std::max(worst, ratio);
  }
  std::cout << "at most " << worst << " of the optimum's time\n";
}

TEST(SolverExact, WithinOnePercentWithTensorsPassedThrough) {
  std::mt19937 random(13);
  for (const int stages : {5, 12, 20, 35, 50}) {
    const auto chain_costs =
        random_chain(random, ChainKind::kPassedThrough, stages);
    EXPECT_LE(worst_ratio(chain_costs), 1.01) << stages << " stages";
  }
}

TEST(SolverExact, WithinOnePercentOnLongChainsNearTheSmallestBudget) {
  // Long enough that the solver omits some intervals.
  std::mt19937 random(14);
  for (const auto kind : {ChainKind::kUniform, ChainKind::kAlike}) {
    EXPECT_LE(worst_ratio(random_chain(random, kind, 150), 1.1), 1.01);
  }
}

TEST(SolverExact, MoreMemoryIsNeverSlower) {
  std::mt19937 random(15);
  for (const auto kind : {ChainKind::kUniform, ChainKind::kAlike,
                          ChainKind::kFarApart, ChainKind::kPassedThrough}) {
    const Solver solver(random_chain(random, kind, 40));
    const auto low = static_cast<double>(solver.smallest_bytes());
    const auto high = static_cast<double>(solver.largest_bytes());
    std::vector<int64_t> budgets;
    for (int i = 0; i < 300; ++i) {
      const double part = std::uniform_real_distribution<>(0, 1)(random);
      // Half of them close to the smallest budget.
      budgets.push_back(
          static_cast<int64_t>(i % 2 == 0 ? low * std::pow(high / low, part)
                                          : low * (1 + part / 10)));
    }
    std::sort(budgets.begin(), budgets.end());
    double before = std::numeric_limits<double>::infinity();
    for (const int64_t bytes : budgets) {
      const auto solution = solver.solve(bytes);
      ASSERT_TRUE(solution);
      ASSERT_LE(solution->simulation.peak_bytes, bytes);
      ASSERT_LE(solution->simulation.time_ms, before) << bytes << " bytes";
      before = solution->simulation.time_ms;
    }
  }
}

}  // namespace
}  // namespace reprise
