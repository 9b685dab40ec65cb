#pragma once

#include "plan/evaluator_cache.h"

#include <vector>

/// Explanations that are displayed with a plan: the frontier of time against
/// memory, and changes that would lower the peak. They use predictions at
/// measured sizes. Tested by tests/plan/planner_test.cpp.
namespace reprise::detail {

/// Returns the fastest plan for each amount of memory over all `keys`.
std::vector<FrontierPoint> frontier_of(const PlanResult& result,
                                       const std::vector<CandidateKey>& keys,
                                       int64_t budget,
                                       EvaluatorCache& evaluators);

/// Returns the common strategies none, all and sqrt at the plan's micro-batch
/// size and at the global batch size.
std::vector<FrontierPoint> references_of(const PlanResult& result,
                                         EvaluatorCache& evaluators);

/// Returns changes that lower the peak of the result's plan: more
/// recomputation, another candidate of `keys`, or an optimizer without state.
std::vector<PeakReduction> peak_reductions_of(
    const PlanResult& result, const std::vector<CandidateKey>& keys,
    const CostProfile& profile, EvaluatorCache& evaluators);

}  // namespace reprise::detail
