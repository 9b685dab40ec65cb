#include "plan/explanation.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

namespace reprise::detail {
namespace {

constexpr int kFrontierPoints = 24;  // per micro-batch size
// Solving a longer chain takes seconds. The frontier then omits candidates that
// have not been solved.
constexpr size_t kManyStages = 256;

FrontierPoint point_of(const Plan& plan) {
  return {plan.peak_bytes, plan.step_ms, plan.micro_batch, {}};
}

}  // namespace

std::vector<FrontierPoint> frontier_of(const PlanResult& result,
                                       const std::vector<CandidateKey>& keys,
                                       int64_t budget,
                                       EvaluatorCache& evaluators) {
  std::vector<FrontierPoint> all;
  bool tried = false;
  const auto add = [&](const Plan& plan) { all.push_back(point_of(plan)); };
  const CandidateKey own = key_of(result.plan);
  for (const CandidateKey& key : keys) {
    if (!evaluators.measured(key)) continue;
    for (const Plan& plan : evaluators.tried(key)) {
      tried = true;
      if (result.request.strategy.empty()) add(plan);
    }
    if (result.stages.size() > kManyStages && key != own &&
        !evaluators.solved(key)) {
      continue;
    }
    for (const Plan& plan : evaluators.frontier(key, kFrontierPoints)) {
      add(evaluators.calibrated(plan));
    }
  }
  if (tried) {
    // Omit predictions that contradict the plan, which was timed and found
    // fastest.
    std::erase_if(all, [&](const FrontierPoint& point) {
      return result.feasible && point.peak_bytes <= budget &&
             point.step_ms <= result.plan.step_ms;
    });
    all.push_back(point_of(result.plan));
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return std::tie(a.peak_bytes, a.step_ms) <
           std::tie(b.peak_bytes, b.step_ms);
  });
  std::vector<FrontierPoint> front;
  for (const FrontierPoint& point : all) {
    if (front.empty() || point.step_ms < front.back().step_ms) {
      front.push_back(point);
    }
  }
  return front;
}

std::vector<FrontierPoint> references_of(const PlanResult& result,
                                         EvaluatorCache& evaluators) {
  std::vector<FrontierPoint> list;
  const Plan& plan = result.plan;
  const std::set<int64_t> sizes{plan.micro_batch, result.request.global_batch};
  for (const int64_t size : sizes) {
    // A smaller micro-batch has more than one per window.
    const UpdateMode update =
        size < result.request.global_batch ? UpdateMode::kAfter : plan.update;
    const CandidateKey key{plan.precision, size, plan.graph, update};
    for (const StrategyKind kind :
         {StrategyKind::kNone, StrategyKind::kAll, StrategyKind::kSqrt}) {
      const Plan there = evaluators.calibrated(
          evaluators.evaluator(key).of_strategy(Strategy{kind}.to_text()));
      list.push_back({there.peak_bytes, there.step_ms, size, kind});
    }
  }
  return list;
}

std::vector<PeakReduction> peak_reductions_of(
    const PlanResult& result, const std::vector<CandidateKey>& keys,
    const CostProfile& profile, EvaluatorCache& evaluators) {
  std::vector<PeakReduction> list;
  const Plan& plan = result.plan;
  const auto add = [&](std::string what, const Plan& there) {
    if (there.peak_bytes >= plan.peak_bytes) return;
    list.push_back({std::move(what), there.peak_bytes, there.step_ms});
  };
  const CandidateKey own = key_of(plan);
  add("recompute more, at the same micro-batch",
      evaluators.calibrated(evaluators.smallest(own)));
  const CandidateKey* smaller = nullptr;
  for (const CandidateKey& key : keys) {
    const auto& [precision, size, graph, update] = key;
    if (precision == plan.precision && graph == plan.graph &&
        size < plan.micro_batch && evaluators.measured(key) &&
        (smaller == nullptr || size > std::get<1>(*smaller))) {
      smaller = &key;
    }
  }
  if (smaller != nullptr) {
    // For a long chain, use the same schedule instead of solving.
    const bool solve =
        result.stages.size() <= kManyStages || evaluators.solved(*smaller);
    const Plan there =
        solve ? evaluators.smallest(*smaller)
              : evaluators.plan_of(*smaller,
                                   evaluators.smallest(own).schedule.to_text());
    add(fmt::format("micro-batch {} instead of {}", std::get<1>(*smaller),
                    plan.micro_batch),
        evaluators.calibrated(there));
  }
  // Only among the precisions of the request: no other one is measured for
  // this.
  const CandidateKey half{Precision::kBf16, plan.micro_batch, plan.graph,
                          plan.update};
  if (plan.precision == Precision::kFp32 &&
      (!result.feasible || plan.peak.is_floor) &&
      std::find(keys.begin(), keys.end(), half) != keys.end() &&
      evaluators.measured(half)) {
    add("bf16 instead of fp32", evaluators.smallest(half));
  }
  if (profile.fixed.optimizer > 0) {
    Plan stateless = plan;
    stateless.peak_bytes -= profile.fixed.optimizer;
    stateless.step_ms = 0;
    add("an optimizer without state (sgd)", stateless);
  }
  return list;
}

}  // namespace reprise::detail
