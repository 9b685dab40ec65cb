#include "plan/brute_force.h"
#include "plan/exact_schedules.h"
#include "recompute/random_costs.h"
#include "support.h"

#include <reprise/plan/solver.h>
#include <reprise/recompute/strategy.h>

#include <iostream>
#include <limits>
#include <map>

namespace reprise {
namespace {

using testing::BruteForce;
using testing::random_costs;

std::vector<Strategy> all_strategies(int stages) {
  std::vector<Strategy> list;
  for (const char* text : {"none", "all", "sqrt"}) {
    list.push_back(Strategy::parse(text));
  }
  for (int k = 1; k <= stages; ++k) {
    list.push_back({StrategyKind::kEvery, k});
    list.push_back({StrategyKind::kCheckpoints, k - 1});
    list.push_back({StrategyKind::kRevolve, k});
  }
  return list;
}

ChainCosts equal_costs(int stages) {
  return ChainCosts::simple(
      1, std::vector<StageCosts>(size_t(stages), StageCosts::simple(1)));
}

TEST(Solver, EqualsBruteForceAtEveryBudget) {
  std::mt19937 random(1);
  int budgets = 0;
  for (int round = 0; round < 600; ++round) {
    const auto chain_costs =
        random_costs(random, {.stages = 1 + round % 6,
                              .max_bytes = round % 3 == 0 ? 2 : 6,
                              .variants = round % 2 == 0});
    const BruteForce truth(chain_costs, BruteForce::kInOrder);
    for (const auto& point : truth.points()) {
      const auto simulation =
          simulate(Schedule("truth", int(chain_costs.stages.size()), point.ops),
                   chain_costs);
      ASSERT_EQ(simulation.peak_bytes, point.peak_bytes);
      ASSERT_EQ(simulation.time_ms, point.time_ms);
    }
    const Solver solver(chain_costs);
    ASSERT_EQ(solver.smallest_bytes(), truth.points().back().peak_bytes);
    ASSERT_EQ(solver.largest_bytes(), truth.points().front().peak_bytes);
    EXPECT_FALSE(solver.solve(solver.smallest_bytes() - 1));
    for (int64_t bytes = solver.smallest_bytes();
         bytes <= solver.largest_bytes() + 1; ++bytes, ++budgets) {
      const auto solution = solver.solve(bytes);
      ASSERT_TRUE(solution);
      ASSERT_LE(solution->simulation.peak_bytes, bytes);
      ASSERT_EQ(solution->simulation.time_ms, truth.time_ms(bytes))
          << "round " << round << ", " << bytes
          << " bytes: " << solution->schedule.to_text();
    }
  }
  std::cout << "equal at " << budgets << " budgets\n";
  EXPECT_GT(budgets, 4000);
}

TEST(Solver, ReportsWhatItsRulesCost) {
  std::mt19937 random(2);
  int budgets = 0, persistent_faster = 0, any_faster = 0;
  double most = 1;
  for (int round = 0; round < 60; ++round) {
    const auto chain_costs =
        random_costs(random, {.stages = 3 + round % 3, .variants = false});
    const BruteForce ours(chain_costs, BruteForce::kInOrder);
    const BruteForce persistent(chain_costs, BruteForce::kPersistent);
    const BruteForce any(chain_costs, BruteForce::kAny);
    for (int64_t bytes = ours.points().back().peak_bytes;
         bytes <= ours.points().front().peak_bytes; ++bytes, ++budgets) {
      const double time = ours.time_ms(bytes);
      ASSERT_LE(persistent.time_ms(bytes), time);
      ASSERT_LE(any.time_ms(bytes), persistent.time_ms(bytes));
      persistent_faster += persistent.time_ms(bytes) < time ? 1 : 0;
      any_faster += any.time_ms(bytes) < time ? 1 : 0;
      most = std::max(most, time / any.time_ms(bytes));
    }
  }
  // Informative only: the cost of the restrictions that keep the program cubic.
  std::cout << "of " << budgets
            << " budgets, other persistent schedules are faster "
            << "at " << persistent_faster << " and arbitrary ones at "
            << any_faster << ", by a factor of up to " << most << "\n";
}

TEST(Solver, NeverSlowerThanAStrategy) {
  std::mt19937 random(3);
  int compared = 0, faster = 0;
  double sum = 0;
  for (int round = 0; round < 1000; ++round) {
    const int stages = 7 + round % 34;
    const auto chain_costs =
        random_costs(random, {.stages = stages,
                              .max_bytes = round % 2 == 0 ? 100 : 100'000'000,
                              .max_ms = 20,
                              .variants = round % 3 == 0,
                              .passed_through = round % 5 == 0});
    const Solver solver(chain_costs, {.slots = 256});
    // A few strategies per chain, so that many chains can be compared.
    const auto strategies = all_strategies(stages);
    for (size_t i = size_t(round) % 9; i < strategies.size(); i += 9) {
      const auto theirs =
          simulate(make_schedule(strategies[i], stages), chain_costs);
      const auto ours = solver.solve(theirs.peak_bytes);
      ASSERT_TRUE(ours);
      ASSERT_LE(ours->simulation.peak_bytes, theirs.peak_bytes);
      ASSERT_LE(ours->simulation.time_ms, theirs.time_ms)
          << strategies[i].to_text();
      ++compared;
      faster += ours->simulation.time_ms < theirs.time_ms ? 1 : 0;
      sum += theirs.time_ms / ours->simulation.time_ms;
    }
  }
  std::cout << "faster than the strategy in " << faster << " of " << compared
            << " cases, by " << sum / compared << " on average\n";
  EXPECT_GT(faster, compared / 2);
}

TEST(Solver, SolvesOneStage) {
  auto stage = StageCosts::simple(10, 5, 1, 2);
  stage.backward_extra_bytes = 7;
  const Solver solver(ChainCosts::simple(100, {stage}));
  // Output, saved tensors, the output's gradient and transient memory.
  EXPECT_EQ(solver.smallest_bytes(), 10 + 5 + 10 + 7);
  EXPECT_EQ(solver.largest_bytes(), solver.smallest_bytes());
  EXPECT_FALSE(solver.solve(31));
  EXPECT_EQ(solver.solve(32)->schedule.to_text(), "K0 B0");
  EXPECT_EQ(solver.frontier().size(), 1u);
}

TEST(Solver, RecomputesNothingAtTheLargestBudget) {
  const auto chain_costs = equal_costs(30);
  const Solver solver(chain_costs);
  const auto none = simulate(make_schedule("none", 30), chain_costs);
  EXPECT_EQ(solver.largest_bytes(), none.peak_bytes);
  EXPECT_EQ(solver.solve(none.peak_bytes)->simulation.total_runs, 30);
  EXPECT_GT(solver.solve(none.peak_bytes - 1)->simulation.total_runs, 30);
  EXPECT_EQ(solver.solve(int64_t{1} << 60)->simulation.total_runs, 30);
}

TEST(Solver, EqualsRevolveOnEqualStages) {
  // Any one stage can be kept at a time, so that a budget is a number of slots.
  StageCosts stage = StageCosts::simple(100, 10'000, 1, 0);
  stage.saved_inputs = stage.saved_outputs = {};
  stage.input_gradient_bytes = stage.backward_extra_bytes = 0;
  StageCosts last = stage;  // like the others, but its output is not saved
  last.outputs[0].bytes = 0;
  last.keep_extra_bytes = 100;
  for (const int stages : {5, 12, 40}) {
    std::vector<StageCosts> list(size_t(stages) - 1, stage);
    list.push_back(last);
    const auto chain_costs = ChainCosts::simple(100, list);
    const Solver solver(chain_costs);
    for (int slots = 2; slots <= 6; ++slots) {
      const Schedule revolve =
          make_schedule(Strategy{StrategyKind::kRevolve, slots}, stages);
      const auto theirs = simulate(revolve, chain_costs);
      const auto ours = solver.solve(theirs.peak_bytes);
      EXPECT_EQ(ours->simulation.total_runs, revolve.total_runs())
          << stages << " stages, " << slots << " slots";
    }
  }
}

TEST(Solver, UsesFasterOrSmallerVariants) {
  auto stage = StageCosts::simple(10, 100, 1, 2);
  StageCosts::Variant lean;
  lean.saved_inputs = {0};
  lean.forward_ms = 1;
  lean.backward_ms = 2.5;
  stage.variants = {lean};
  const Solver solver(
      ChainCosts::simple(10, std::vector<StageCosts>(4, stage)));
  EXPECT_EQ(solver.solve(solver.largest_bytes())->schedule.to_text(),
            "K0 K1 K2 K3 B3 B2 B1 B0");
  // If one of four stages does not fit, the smaller variant is the fastest
  // choice.
  const auto less = solver.solve(solver.largest_bytes() - 1);
  EXPECT_EQ(less->simulation.time_ms, 12.5);
  EXPECT_EQ(less->simulation.total_runs, 4);
}

TEST(Solver, PassedThroughTensorsStayWithinTheBudget) {
  std::mt19937 random(4);
  int exact = 0, all = 0;
  for (int round = 0; round < 300; ++round) {
    const auto chain_costs = random_costs(
        random,
        {.stages = 2 + round % 20, .max_bytes = 50, .passed_through = true});
    const Solver solver(chain_costs);
    const int64_t step =
        1 + (solver.largest_bytes() - solver.smallest_bytes()) / 8;
    for (int64_t bytes = solver.smallest_bytes();
         bytes <= solver.largest_bytes() + step; bytes += step) {
      const auto solution = solver.solve(bytes);
      ASSERT_TRUE(solution);
      ASSERT_LE(solution->simulation.peak_bytes, bytes);
      ++all;
      exact += solution->schedule.name() == "optimal" ? 1 : 0;
    }
  }
  EXPECT_GT(exact, all / 2);
}

/// Returns every way to reverse stages s … t-1: stage s is kept, or the stages
/// up to a split are dropped.
std::vector<std::vector<Op>> all_ways(int s, int t, int stages) {
  std::vector<std::vector<Op>> ways;
  if (t == s + 1) {
    std::vector<Op> ops = {{OpKind::kForwardKeep, s}};
    if (t < stages) ops.push_back({OpKind::kDiscard, t});
    ops.push_back({OpKind::kBackward, s});
    return {ops};
  }
  for (auto ops : all_ways(s + 1, t, stages)) {
    ops.insert(ops.begin(), {OpKind::kForwardKeep, s});
    ops.push_back({OpKind::kBackward, s});
    ways.push_back(std::move(ops));
  }
  for (int split = s + 1; split < t; ++split) {
    for (const auto& rest : all_ways(split, t, stages)) {
      for (const auto& front : all_ways(s, split, stages)) {
        std::vector<Op> ops;
        for (int i = s; i < split; ++i) {
          ops.push_back(
              {i == s ? OpKind::kForwardKeepInput : OpKind::kForwardDrop, i});
        }
        ops.insert(ops.end(), rest.begin(), rest.end());
        ops.insert(ops.end(), front.begin(), front.end());
        ways.push_back(std::move(ops));
      }
    }
  }
  return ways;
}

TEST(Solver, PassedThroughTensorsCountOnce) {
  std::mt19937 random(7);
  int budgets = 0;
  for (int round = 0; round < 200; ++round) {
    const int stages = 3 + round % 3;
    auto chain_costs = random_costs(random, {.stages = stages,
                                             .max_bytes = 10,
                                             .variants = false,
                                             .passed_through = true});
    // Like a loss: memory that an output shares with boundaries is counted
    // twice.
    chain_costs.stages.back().outputs.resize(1);
    chain_costs.stages.back().saved_outputs = {};
    std::map<int64_t, double> truth;  // minimum time by peak
    for (auto& ops : all_ways(0, stages, stages)) {
      const auto way = simulate(Schedule("way", stages, ops), chain_costs);
      const auto at = truth.try_emplace(way.peak_bytes, way.time_ms).first;
      at->second = std::min(at->second, way.time_ms);
    }
    const Solver solver(chain_costs);
    const testing::ExactSchedules exact(chain_costs);
    double least = std::numeric_limits<double>::infinity();
    for (const auto& [bytes, time_ms] : truth) {
      least = std::min(least, time_ms);
      ASSERT_EQ(exact.time_ms(bytes), least) << "of the reference";
      const auto solution = solver.solve(bytes);
      ASSERT_TRUE(solution);
      ASSERT_EQ(solution->simulation.time_ms, least)
          << "round " << round << ", " << bytes << " bytes";
      ++budgets;
    }
  }
  std::cout << "equal at " << budgets << " budgets\n";
}

/// A U-Net: every level passes its output to the opposite level.
ChainCosts unet_costs(int levels, int64_t bytes) {
  std::vector<StageCosts> stages;
  int skips = 0;
  for (int i = 0; i < levels; ++i, ++skips, bytes /= 2) {
    auto down = StageCosts::simple(bytes, bytes);
    down.outputs.push_back({bytes, -1});  // the skip connection
    for (int s = 0; s < skips; ++s) down.outputs.push_back({0, 1 + s});
    stages.push_back(down);
  }
  for (int i = 0; i < levels; ++i, bytes *= 2) {
    auto up = StageCosts::simple(bytes, bytes);
    up.saved_inputs = {0, 1};
    for (int s = 1; s < skips; ++s) up.outputs.push_back({0, 1 + s});
    --skips;
    stages.push_back(up);
  }
  return ChainCosts::simple(bytes, stages);
}

TEST(Solver, SkipConnectionsCountOnce) {
  for (const int levels : {1, 2, 5}) {
    const auto chain_costs = unet_costs(levels, 1 << 20);
    const int stages = 2 * levels;
    const Solver solver(chain_costs);
    for (const Strategy& strategy : all_strategies(stages)) {
      const auto theirs =
          simulate(make_schedule(strategy, stages), chain_costs);
      const auto ours = solver.solve(theirs.peak_bytes);
      ASSERT_TRUE(ours) << strategy.to_text();
      EXPECT_LE(ours->simulation.time_ms, theirs.time_ms);
    }
    EXPECT_EQ(solver.largest_bytes(),
              simulate(make_schedule("none", stages), chain_costs).peak_bytes);
  }
}

TEST(Solver, FrontierIsMonotonic) {
  std::mt19937 random(5);
  const auto chain_costs =
      random_costs(random, {.stages = 30, .max_bytes = 1'000'000});
  const Solver solver(chain_costs);
  const auto frontier = solver.frontier(20);
  ASSERT_GE(frontier.size(), 5u);
  ASSERT_LE(frontier.size(), 20u);
  EXPECT_EQ(frontier.front().simulation.peak_bytes, solver.smallest_bytes());
  EXPECT_EQ(frontier.back().simulation.peak_bytes, solver.largest_bytes());
  for (size_t i = 1; i < frontier.size(); ++i) {
    const auto &a = frontier[i - 1].simulation, &b = frontier[i].simulation;
    EXPECT_LT(a.peak_bytes, b.peak_bytes);
    EXPECT_GT(a.time_ms, b.time_ms);
  }
  EXPECT_THROW(solver.frontier(1), c10::Error);
}

TEST(Solver, SolvesLongChains) {
  std::mt19937 random(6);
  const auto chain_costs = random_costs(
      random, {.stages = 200, .max_bytes = 1'000'000, .variants = false});
  const Solver solver(chain_costs, {.slots = 64});
  for (const char* strategy : {"none", "sqrt", "all", "revolve:5"}) {
    const auto theirs = simulate(make_schedule(strategy, 200), chain_costs);
    const auto ours = solver.solve(theirs.peak_bytes);
    ASSERT_TRUE(ours);
    EXPECT_LE(ours->simulation.peak_bytes, theirs.peak_bytes);
    EXPECT_LE(ours->simulation.time_ms, theirs.time_ms) << strategy;
  }
}

TEST(Solver, RejectsInvalidArguments) {
  EXPECT_NE(testing::error_of([] {
              Solver(ChainCosts{});
            }).find("at least one stage, got none"),
            std::string::npos);
  EXPECT_THROW(Solver(equal_costs(2), {.slots = -1}), c10::Error);
}

}  // namespace
}  // namespace reprise
