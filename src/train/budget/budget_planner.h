#pragma once

#include "train/step/train_setup.h"

#include <reprise/train/planning.h>

#include <memory>

namespace reprise::detail {

/// Plans a training with its own model, which is unchanged afterwards.
std::unique_ptr<BudgetPlanner> make_budget_planner(
    TrainSetup setup, PlanRequest request, const PlanningOptions& options = {});

}  // namespace reprise::detail
