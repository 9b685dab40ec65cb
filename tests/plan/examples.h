#pragma once

#include <reprise/plan/planner.h>
#include <reprise/recompute/strategy.h>

#include <string>
#include <vector>

/// Planner results for tests of their output.
namespace reprise::testing {

constexpr int64_t kMiB = 1 << 20;

inline Plan example_plan(int64_t micro_batch, int64_t accumulate,
                         const Schedule& schedule) {
  Plan plan{32,       micro_batch, accumulate, micro_batch, Precision::kFp32,
            schedule, 0,           0,          0,           0,
            {}};
  plan.peak_bytes = 600 * kMiB;
  plan.kept_bytes = 180 * kMiB;
  plan.micro_ms = 50;
  plan.step_ms = 210;
  return plan;
}

inline PeakReport example_peak() {
  PeakReport peak;
  peak.phase = "backward";
  peak.stage = 1;
  peak.stage_name = "block1";
  peak.parameters = 60 * kMiB;
  peak.gradients = 60 * kMiB;
  peak.optimizer = 120 * kMiB;
  peak.data = 30 * kMiB;
  peak.kept = 210 * kMiB;
  peak.kept_by_stage = {100 * kMiB, 80 * kMiB, 20 * kMiB, 10 * kMiB};
  peak.in_flight = 60 * kMiB;
  peak.workspace = 60 * kMiB;
  peak.is_floor = true;
  return peak;
}

/// Returns a result for four stages, of which the first two are recomputed,
/// with a budget of 800 MiB.
inline PlanResult example_result() {
  const auto schedule = make_segments("optimal", 4, {0, 2});
  PlanResult result{{}, true, example_plan(8, 4, schedule), {}, {}, {}, {},
                    {}, 0};
  result.request.global_batch = 32;
  result.request.memory = 800 * kMiB;
  result.plan.peak = example_peak();
  result.alternatives = {example_plan(4, 8, schedule)};
  result.frontier = {{400 * kMiB, 260, 4, {}}, {600 * kMiB, 210, 8, {}}};
  result.references = {{700 * kMiB, 200, 8, StrategyKind::kNone},
                       {450 * kMiB, 280, 8, StrategyKind::kAll},
                       {550 * kMiB, 250, 8, StrategyKind::kSqrt},
                       {2000 * kMiB, 190, 32, StrategyKind::kNone}};
  result.peak_reductions = {{"micro-batch 4 instead of 8", 400 * kMiB, 260},
                            {"sgd instead of adamw", 480 * kMiB, 0}};
  result.stages = {"stem", "block1", "block2", "head"};
  result.smallest_bytes = 300 * kMiB;
  return result;
}

/// Returns the same result with `count` stages and another strategy.
inline PlanResult long_result(int count, const std::string& strategy) {
  PlanResult result = example_result();
  result.stages.clear();
  for (int i = 0; i < count; ++i) {
    result.stages.push_back("transformer.layers." + std::to_string(i) +
                            ".attention.output");
  }
  result.plan.schedule = make_schedule(strategy, count);
  result.plan.peak.kept_by_stage.assign(static_cast<size_t>(count), kMiB);
  return result;
}

}  // namespace reprise::testing
