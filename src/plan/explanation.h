#pragma once

#include "plan/evaluations.h"

#include <vector>

/// What a plan is shown with: other points of time against memory, and what would
/// lower its peak. All of sizes that were measured, by predictions.
namespace reprise::detail {

/// Best time for every memory, over `keys`.
std::vector<FrontierPoint> frontier_of(const PlanResult& result,
                                       const std::vector<Key>& keys,
                                       int64_t budget,
                                       Evaluations& evaluations);

/// What people set by hand.
std::vector<FrontierPoint> references_of(const PlanResult& result,
                                         Evaluations& evaluations);

/// What lowers the peak of the plan, of `keys` and of the optimizer.
std::vector<PeakReduction> measures_of(const PlanResult& result,
                                       const std::vector<Key>& keys,
                                       const CostProfile& profile,
                                       Evaluations& evaluations);

}  // namespace reprise::detail
