#pragma once

#include <reprise/plan/planner.h>

#include <cstdint>
#include <string>

/// Parts of a plan as people say them.
namespace reprise::detail {

/// "micro-batch 12 × 3 (the last one 8) = 32 samples per update".
std::string batches_in_words(const Plan& plan);

/// "keeps 9 of 14 stages, recomputes 5 once".
std::string schedule_in_words(const Schedule& schedule);

/// "5.28 MiB (5535432 bytes)".
std::string exact_bytes(int64_t bytes);

/// The same for a budget that is suggested: the first figure is rounded up, so that
/// either of the two is enough if it is typed.
std::string enough_bytes(int64_t bytes);

}  // namespace reprise::detail
