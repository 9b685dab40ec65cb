#pragma once

#include <reprise/plan/planner.h>

#include <string>

/// Parts of a plan as people say them.
namespace reprise::plan_detail {

/// "micro-batch 12 × 3 (the last one 8) = 32 samples an update".
std::string batches_in_words(const Plan& plan);

/// "keeps 9 of 14 stages, recomputes 5 once".
std::string schedule_in_words(const Schedule& schedule);

}  // namespace reprise::plan_detail
