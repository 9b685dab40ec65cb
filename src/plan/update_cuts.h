#pragma once

#include <cstdint>
#include <vector>

namespace reprise::detail {

/// Returns the stages at which the autograd graph is cut if parameters are updated in the
/// backward, in descending order. `final_bytes`: gradients by the first stage that uses their
/// parameter, whose backward makes them final. Gradients between two cuts are alive at once:
/// stages with few of them share a graph, because each graph needs a backward call.
///
/// Tested by tests/plan/update_cuts_test.cpp.
std::vector<int> update_cuts(const std::vector<int64_t>& final_bytes);

}  // namespace reprise::detail
