#pragma once

#include <reprise/plan/planner.h>

#include <cstdint>
#include <string>

/// Text for parts of a plan. Implemented in plan_text.cpp.
/// Tested by tests/plan/plan_text_test.cpp.
namespace reprise::detail {

/// Returns "micro-batch 12 × 3 (the last one 8) = 32 samples per update".
std::string describe_batches(const Plan& plan);

/// Returns "keeps 9 of 14 stages, recomputes 5 once".
std::string describe_schedule(const Schedule& schedule);

/// Returns "5.28 MiB (5535432 bytes)".
std::string format_exact_bytes(int64_t bytes);

/// As format_exact_bytes(), for a suggested budget: the first number is rounded
/// up, so that either of the two is sufficient.
std::string format_sufficient_bytes(int64_t bytes);

/// Returns the strategy of `point`, or "optimal".
std::string recompute_text(const FrontierPoint& point);

/// What of a training's state is in host memory; empty: nothing.
inline std::string_view state_on_host_text(StatePlace place) {
  if (place == StatePlace::kHost) return "optimizer state";
  if (place == StatePlace::kHostAll) {
    return "parameters, gradients and optimizer state";
  }
  return "";
}

}  // namespace reprise::detail
