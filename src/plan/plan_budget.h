#pragma once

#include <reprise/plan/planner.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace reprise::detail {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 4;

/// The budget of a request and its margin for errors of predictions. Memory whose size is known
/// needs no margin: that of the weights, their copies and the optimizer's state, in the
/// precision that has least of it. Tested by tests/plan/planner_test.cpp.
class PlanBudget {
 public:
  PlanBudget(const PlanRequest& request, CostSource& costs)
      : margin_(request.margin),
        exact_bytes_(exact_bytes(request, costs)),
        bytes_(request.memory > 0 ? request.memory - left_free(request.memory)
                                  : kNoLimit) {}

  /// Maximum of a plan's peak.
  int64_t bytes() const { return bytes_; }

  /// Returns the budget of a request that a plan with this peak fits into.
  int64_t with_margin(int64_t peak_bytes) const {
    const auto exact = static_cast<double>(std::min(exact_bytes_, peak_bytes));
    const double rest = static_cast<double>(peak_bytes) + 1 - exact;
    return static_cast<int64_t>(std::ceil(exact + rest / (1 - margin_)));
  }

 private:
  static int64_t exact_bytes(const PlanRequest& request, CostSource& costs) {
    if (request.memory == 0) return 0;
    int64_t least = kNoLimit;
    for (const Precision precision : request.precisions) {
      const FixedMemory& fixed = costs.profile(precision).fixed;
      least = std::min(least, fixed.parameters + fixed.optimizer);
    }
    return std::min(least, request.memory);
  }

  /// The part of a budget that the margin leaves free.
  int64_t left_free(int64_t budget) const {
    return static_cast<int64_t>(
        std::ceil(static_cast<double>(budget - exact_bytes_) * margin_));
  }

  double margin_;
  int64_t exact_bytes_;
  int64_t bytes_;
};

}  // namespace reprise::detail
