#pragma once

#include <reprise/plan/planner.h>

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace reprise::detail {

/// Decides which micro-batch sizes a planner considers, and measures them.
class SizeSearch {
 public:
  /// Tells whether a plan at `precision` fits, by the costs measured so far.
  using HasPlan = std::function<bool(Precision precision)>;

  /// `budget` is the maximum peak in bytes. Holds references to the other
  /// arguments.
  SizeSearch(const PlanRequest& request, CostSource& costs, int64_t budget);

  /// Sizes under consideration, in ascending order.
  const std::vector<int64_t>& sizes() const { return sizes_; }

  /// Returns whether a plan may use this size: the model can run it, and it is
  /// smaller than any size that was excluded at this precision.
  bool is_candidate(Precision precision, int64_t size) const;

  /// Measures the smallest size and, in steps of at least a factor of four,
  /// larger ones that may fit.
  void measure_initial(Precision precision, const HasPlan& has_plan);

  /// Measures one size and returns whether that succeeded. If the device runs
  /// out of memory, all larger sizes are excluded. A size that the model cannot
  /// run is skipped, unless it is the largest one, for which the c10::Error
  /// propagates.
  bool measure(Precision precision, int64_t size);

  /// If there are many candidate sizes, only some are considered at first. Adds
  /// all sizes between the neighbours of `size`. Returns false if there are
  /// none.
  bool refine(int64_t size);

 private:
  void exclude_from(Precision precision, int64_t size);
  bool is_too_slow(Precision precision, int64_t size, const HasPlan& has_plan);
  double time_ratio(Precision precision, Precision other, int64_t size) const;
  bool may_fit(const CostProfile& profile, int64_t size) const;

  const PlanRequest& request_;
  CostSource& costs_;
  int64_t budget_;
  std::vector<int64_t> all_sizes_;
  std::vector<int64_t> sizes_;                  // subset of all_sizes_
  std::map<Precision, int64_t> excluded_from_;  // smallest size, by precision
  std::set<int64_t> cannot_run_;
};

}  // namespace reprise::detail
