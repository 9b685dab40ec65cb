#pragma once

#include <reprise/plan/planner.h>

#include <cstdint>
#include <vector>

namespace reprise::detail {

/// The micro-batch sizes worth a thought, rising: those b with which N samples make
/// ceil(N/b) micro-batches, for every number of micro-batches, since any other size makes
/// as many, and larger ones. The given one alone if one is given.
std::vector<int64_t> candidate_sizes(const PlanRequest& request);

/// At most about twenty of `sizes`, evenly by ratio, the first and the last included.
std::vector<int64_t> thinned(const std::vector<int64_t>& sizes);

}  // namespace reprise::detail
