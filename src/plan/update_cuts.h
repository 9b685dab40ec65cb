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

/// Returns the size up to which gradients of a graph's outputs are held until the end of its
/// backward, so that a backward in which an allocation fails can continue there. It is a small
/// part of what updates in the backward save, since `gradient_bytes`, those of all parameters,
/// are never alive at once.
int64_t most_held_bytes(int64_t gradient_bytes);

}  // namespace reprise::detail
