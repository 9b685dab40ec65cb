#pragma once

#include "train/budget/training_costs.h"

#include <reprise/train/planning.h>

#include <memory>

namespace reprise::detail {

/// Plans for a session with its own model: what it measures leaves no mark.
std::unique_ptr<BudgetPlanner> make_budget_planner(
    CostParts parts, PlanRequest request, const PlanningOptions& options = {});

}  // namespace reprise::detail
