#pragma once

#include <reprise/recompute/schedule.h>

#include <vector>

namespace reprise::detail {

/// Consecutive operations of a schedule on one stage.
struct StageVisit {
  int stage = 0;
  bool backward = false;  ///< whether one of them is the backward
  bool operator==(const StageVisit&) const = default;
};

/// Returns the visits of a schedule, in order. Tested by
/// tests/recompute/host_parameters_test.cpp.
std::vector<StageVisit> stage_visits(const Schedule& schedule);

}  // namespace reprise::detail
