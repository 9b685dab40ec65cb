#pragma once

#include <reprise/plan/planner.h>

#include <cstdint>
#include <vector>

namespace reprise::detail {

/// Returns the micro-batch sizes worth considering, in ascending order. For
/// each possible number of micro-batches, this is the smallest size that needs
/// no more of them for the global batch; larger sizes need more memory for the
/// same number. If the request names a size, returns only that size.
/// Tested by tests/plan/size_search_test.cpp.
std::vector<int64_t> candidate_sizes(const PlanRequest& request);

/// Returns at most about twenty of `sizes`, spaced by equal ratios, including
/// the first and the last one.
std::vector<int64_t> subsample_sizes(const std::vector<int64_t>& sizes);

}  // namespace reprise::detail
