#pragma once

#include "train/step/train_setup.h"

#include <reprise/train/planning.h>

#include <memory>

namespace reprise::detail {

/// Returns a planner that measures with the model of `setup` and restores the
/// model's state after each measurement. Tested by
/// tests/train/budget/planning_test.cpp.
std::unique_ptr<BudgetPlanner> make_budget_planner(
    TrainSetup setup, PlanRequest request, const PlanningOptions& options = {});

}  // namespace reprise::detail
