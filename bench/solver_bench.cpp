// Time and memory of the solver, and the time of each strategy relative to the solver's
// schedule with the same memory. The costs are synthetic: stages as uneven as those of
// a network whose resolution falls while its width grows. Training times are simulated;
// see tradeoff_bench for the accuracy of the simulation. With --exact-chains, compares
// the solver with the exact optimum instead.
#include "options.h"
#include "plan/exact_schedules.h"
#include "plan/random_chains.h"
#include "side_by_side.h"

#include <reprise/base/bytes.h>
#include <reprise/memory/meter.h>
#include <reprise/plan/solver.h>
#include <reprise/recompute/strategy.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <iostream>
#include <optional>
#include <random>

namespace {

using reprise::ChainCosts;
using reprise::StageCosts;

ChainCosts uneven_stages(int count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> vary(0.5, 2.0);
  const auto bytes = [&](double most) {
    return static_cast<int64_t>(most * vary(random));
  };
  std::vector<StageCosts> stages;
  for (int i = 0; i < count; ++i) {
    const double size = 4e6 * std::pow(0.5, 4 * i / count);
    auto stage = StageCosts::simple(bytes(size), bytes(2 * size), vary(random),
                                    2 * vary(random));
    stage.keep_extra_bytes = stage.drop_extra_bytes = bytes(size / 4);
    stages.push_back(std::move(stage));
  }
  return ChainCosts::simple(2'000'000, std::move(stages));
}

struct Row {
  std::string strategy;
  int64_t peak_bytes = 0;
  double time = 0, optimum = 0;  // relative to "none"
};

struct Result {
  int stages = 0;
  double build_ms = 0, solve_ms = 0;
  int64_t table_bytes = 0, process_peak_bytes = 0;
  int64_t smallest_bytes = 0, largest_bytes = 0;
  std::vector<Row> rows;
};

Result measure(int stages, const std::vector<std::string>& strategies) {
  const auto figures = uneven_stages(stages, 1);
  Result result;
  result.stages = stages;
  reprise::reset_process_peak();
  std::optional<reprise::Solver> solver;
  result.build_ms =
      reprise::bench::milliseconds([&] { solver.emplace(figures); });
  result.process_peak_bytes = reprise::process_memory().rss_peak;
  result.table_bytes = solver->table_bytes();
  result.smallest_bytes = solver->smallest_bytes();
  result.largest_bytes = solver->largest_bytes();
  const double none =
      simulate(reprise::make_schedule("none", stages), figures).time_ms;
  std::vector<double> solve_ms;
  for (const std::string& strategy : strategies) {
    const auto theirs =
        simulate(reprise::make_schedule(strategy, stages), figures);
    solve_ms.push_back(reprise::bench::milliseconds([&] {
      const auto ours = solver->solve(theirs.peak_bytes);
      TORCH_CHECK(ours && ours->simulation.peak_bytes <= theirs.peak_bytes &&
                      ours->simulation.time_ms <= theirs.time_ms,
                  "[solver_bench] ", strategy,
                  " is faster than the solver's schedule");
      result.rows.push_back({strategy, theirs.peak_bytes, theirs.time_ms / none,
                             ours->simulation.time_ms / none});
    }));
  }
  result.solve_ms = reprise::bench::spread_of(solve_ms).median;
  return result;
}

void print(const Result& result) {
  using reprise::format_bytes;
  fmt::print(
      "{} stages: tables {:.0f} ms, {}; process peak {}; {:.1f} ms per "
      "budget\n{} to {}\n\n",
      result.stages, result.build_ms, format_bytes(result.table_bytes),
      format_bytes(result.process_peak_bytes), result.solve_ms,
      format_bytes(result.smallest_bytes), format_bytes(result.largest_bytes));
  fmt::print("{:<16}{:>12}{:>8}{:>8}{:>10}{:>8}\n", "strategy", "peak", "",
             "time", "optimum", "ratio");
  for (const Row& row : result.rows) {
    fmt::print("{:<16}{:>12}{:>7.1f}%{:>8.2f}{:>10.2f}{:>8.2f}\n", row.strategy,
               format_bytes(row.peak_bytes),
               100.0 * static_cast<double>(row.peak_bytes) /
                   static_cast<double>(result.largest_bytes),
               row.time, row.optimum, row.time / row.optimum);
  }
  fmt::print("\n");
}

nlohmann::json to_json(const Result& result) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Row& row : result.rows) {
    rows.push_back({{"strategy", row.strategy},
                    {"peak_bytes", row.peak_bytes},
                    {"time_over_none", row.time},
                    {"optimum_over_none", row.optimum}});
  }
  return {{"stages", result.stages},
          {"build_ms", result.build_ms},
          {"solve_ms", result.solve_ms},
          {"table_bytes", result.table_bytes},
          {"process_peak_bytes", result.process_peak_bytes},
          {"smallest_bytes", result.smallest_bytes},
          {"largest_bytes", result.largest_bytes},
          {"rows", rows}};
}

/// Chain `index` of the comparison. Most are short, because the time of the exact
/// dynamic program grows with the fourth power of the number of stages.
ChainCosts compared_chain(int index, int fewest, int most) {
  using reprise::testing::ChainKind;
  std::mt19937 random(static_cast<unsigned>(index));
  const double part = std::uniform_real_distribution<double>(0, 1)(random);
  const int stages = static_cast<int>(
      std::lround(fewest * std::pow(static_cast<double>(most) / fewest, part)));
  constexpr ChainKind kKinds[] = {ChainKind::kUniform, ChainKind::kAlike,
                                  ChainKind::kFarApart};
  return random_chain(random, kKinds[index % 3], stages);
}

struct Comparison {
  double budget = 0;  // relative to the smallest budget
  double worst = 0, sum = 0;
  int worst_chain = 0, worst_stages = 0;
};

/// Compares chains `first` to `first + count - 1`, and prints the progress, because the
/// exact dynamic program takes seconds for a long chain.
void compare(int first, int count, const std::vector<int>& stages) {
  std::vector<Comparison> rows;
  for (const double budget : reprise::testing::compared_budgets()) {
    rows.push_back({budget});
  }
  double solver_ms = 0, exact_ms = 0;
  int smallest_equal = 0, rising = 0;
  for (int chain = first; chain < first + count; ++chain) {
    const auto figures = compared_chain(chain, stages.front(), stages.back());
    std::optional<reprise::testing::ExactSchedules> exact;
    exact_ms += reprise::bench::milliseconds([&] { exact.emplace(figures); });
    std::optional<reprise::Solver> solver;
    solver_ms += reprise::bench::milliseconds([&] { solver.emplace(figures); });
    const int64_t smallest = exact->least_bytes();
    smallest_equal += solver->smallest_bytes() == smallest ? 1 : 0;
    double before = 0;
    for (Comparison& row : rows) {
      // Rounded up, so that it is not below the smallest budget.
      const auto bytes = static_cast<int64_t>(
          std::ceil(static_cast<double>(smallest) * row.budget));
      std::optional<reprise::Solver::Solution> ours;
      solver_ms +=
          reprise::bench::milliseconds([&] { ours = solver->solve(bytes); });
      TORCH_CHECK(ours && ours->simulation.peak_bytes <= bytes,
                  "[solver_bench] chain ", chain, " has no schedule within ",
                  bytes, " bytes");
      const double time = ours->simulation.time_ms;
      if (before > 0 && time > before) ++rising;
      before = time;
      const double ratio = time / exact->time_ms(bytes).value();
      row.sum += ratio;
      if (ratio <= row.worst) continue;
      row.worst = ratio;
      row.worst_chain = chain;
      row.worst_stages = static_cast<int>(figures.stages.size());
    }
    fmt::print(stderr, "chain {}, {} of {}\n", chain, chain - first + 1, count);
  }
  fmt::print(
      "{} chains of {} to {} stages, from {}: smallest budget equal in {}, "
      "slower with more memory {} times\nsolver {:.0f} ms per chain, exact "
      "program {:.0f} ms\n\n{:>10}{:>10}{:>10}{:>8}{:>8}\n",
      count, stages.front(), stages.back(), first, smallest_equal, rising,
      solver_ms / count, exact_ms / count, "budget", "worst", "mean", "chain",
      "stages");
  for (const Comparison& row : rows) {
    fmt::print("{:>10.3f}{:>10.5f}{:>10.5f}{:>8}{:>8}\n", row.budget, row.worst,
               row.sum / count, row.worst_chain, row.worst_stages);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> stages = {100, 300, 1000};
  std::vector<std::string> strategies = {
      "none", "every:2",    "every:4",   "sqrt",      "every:20",
      "all",  "revolve:20", "revolve:8", "revolve:4", "revolve:3"};
  std::string format = "table";
  int exact_chains = 0, exact_first = 0;
  reprise::bench::Options("Time and memory of the solver and of its schedules")
      .add_positive("--stages", &stages, "Numbers of stages")
      .add("--recompute", &strategies, "Strategies to compare with")
      .add("--exact-chains", &exact_chains,
           "Number of random chains to compare with the exact optimum; the "
           "first "
           "and last of --stages are their minimum and maximum length")
      .add("--exact-first", &exact_first, "Index of the first of these chains")
      .add_format(&format)
      .parse(argc, argv);

  if (exact_chains > 0) {
    compare(exact_first, exact_chains, stages);
    return 0;
  }
  nlohmann::json list = nlohmann::json::array();
  for (const int count : stages) {
    const Result result = measure(count, strategies);
    list.push_back(to_json(result));
    if (format == "table") print(result);
  }
  if (format == "json") std::cout << list.dump(2) << "\n";
  return 0;
}
