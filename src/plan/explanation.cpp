#include "plan/explanation.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

namespace reprise::detail {
namespace {

constexpr int kFrontierPoints = 24;  // of each micro-batch size
// Solving a longer chain takes seconds: the frontier then leaves out the sizes that
// no answer needed solved.
constexpr size_t kManyStages = 256;

FrontierPoint point_of(const Plan& plan) {
  return {plan.peak_bytes, plan.step_ms, plan.micro_batch, {}};
}

}  // namespace

std::vector<FrontierPoint> frontier_of(const PlanResult& result,
                                       const std::vector<Key>& keys,
                                       int64_t budget,
                                       Evaluations& evaluations) {
  std::vector<FrontierPoint> all;
  bool tried = false;
  const auto add = [&](const Plan& plan) { all.push_back(point_of(plan)); };
  const Key own = key_of(result.plan);
  for (const Key& key : keys) {
    if (!evaluations.measured(key)) continue;
    const auto times = evaluations.times_of(key);
    for (const auto& [schedule, ms] : times) {
      tried = true;
      if (!result.request.strategy.empty()) continue;
      add(evaluations.of(key).with_time(evaluations.plan_of(key, schedule),
                                        ms));
    }
    if (result.stages.size() > kManyStages && key != own &&
        !evaluations.solved(key)) {
      continue;
    }
    for (const Plan& plan : evaluations.frontier(key, kFrontierPoints)) {
      add(evaluations.likely(plan));
    }
  }
  if (tried) {
    // No prediction within the budget stands against the plan, which was tried.
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
                                         Evaluations& evaluations) {
  std::vector<FrontierPoint> list;
  const Plan& plan = result.plan;
  const std::set<int64_t> sizes{plan.micro_batch, result.request.global_batch};
  for (const int64_t size : sizes) {
    const Key key{plan.precision, size, plan.graph};
    for (const char* name : {"none", "all", "sqrt"}) {
      const Plan there =
          evaluations.likely(evaluations.of(key).of_strategy(name));
      list.push_back({there.peak_bytes, there.step_ms, size, name});
    }
  }
  return list;
}

std::vector<PeakReduction> measures_of(const PlanResult& result,
                                       const std::vector<Key>& keys,
                                       const CostProfile& profile,
                                       Evaluations& evaluations) {
  std::vector<PeakReduction> list;
  const Plan& plan = result.plan;
  const auto add = [&](std::string what, const Plan& there) {
    if (there.peak_bytes >= plan.peak_bytes) return;
    list.push_back({std::move(what), there.peak_bytes, there.step_ms});
  };
  const Key own = key_of(plan);
  add("recompute more, at the same micro-batch",
      evaluations.likely(evaluations.smallest(own)));
  const Key* smaller = nullptr;
  for (const Key& key : keys) {
    const auto& [precision, size, graph] = key;
    if (precision == plan.precision && graph == plan.graph &&
        size < plan.micro_batch && evaluations.measured(key) &&
        (smaller == nullptr || size > std::get<1>(*smaller))) {
      smaller = &key;
    }
  }
  if (smaller != nullptr) {
    // Of a long chain by the same schedule, which takes no solver.
    const bool solve =
        result.stages.size() <= kManyStages || evaluations.solved(*smaller);
    const Plan there =
        solve ? evaluations.smallest(*smaller)
              : evaluations.plan_of(
                    *smaller, evaluations.smallest(own).schedule.to_text());
    add(fmt::format("micro-batch {} instead of {}", std::get<1>(*smaller),
                    plan.micro_batch),
        evaluations.likely(there));
  }
  // Of the precisions that were allowed: another one is not run for this.
  const Key half{"bf16", plan.micro_batch, plan.graph};
  if (plan.precision == "fp32" && (!result.feasible || plan.peak.is_floor) &&
      std::find(keys.begin(), keys.end(), half) != keys.end() &&
      evaluations.measured(half)) {
    add("bf16 instead of fp32", evaluations.smallest(half));
  }
  if (profile.fixed.optimizer > 0) {
    Plan lean = plan;
    lean.peak_bytes -= profile.fixed.optimizer;
    lean.step_ms = 0;
    add("an optimizer without state (sgd)", lean);
  }
  return list;
}

}  // namespace reprise::detail
