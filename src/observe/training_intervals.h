#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

namespace reprise::detail {

/// The intervals of a clock during which a training ran. Maps clock time to training
/// time, which excludes pauses. Tested by tests/observe/nvml_utilisation_test.cpp.
class TrainingIntervals {
 public:
  bool empty() const { return intervals_.empty(); }

  /// Starts an interval. Intervals never overlap, even if the clock jumps back.
  void open(double now_s) {
    close(now_s);
    const double before_s =
        empty() ? 0 : training_s(std::numeric_limits<double>::infinity());
    const double from_s =
        empty() ? now_s : std::max(now_s, intervals_.back().to_s);
    intervals_.push_back(
        {from_s, std::numeric_limits<double>::infinity(), before_s});
    open_ = true;
  }
  /// Ends the open interval, if there is one.
  void close(double now_s) {
    if (!open_) return;
    intervals_.back().to_s = std::max(intervals_.back().from_s, now_s);
    open_ = false;
  }

  /// The end of the last interval; nullopt while it is open.
  std::optional<double> end_s() const {
    if (empty() || open_) return std::nullopt;
    return intervals_.back().to_s;
  }

  /// The training time that has passed at clock time `at_s`.
  double training_s(double at_s) const {
    // Queries are mostly for recent times.
    for (auto interval = intervals_.rbegin(); interval != intervals_.rend();
         ++interval) {
      if (at_s > interval->from_s) {
        return interval->before_s + std::min(at_s, interval->to_s) -
               interval->from_s;
      }
    }
    return 0;
  }

 private:
  struct Interval {
    double from_s = 0, to_s = 0;
    double before_s = 0;  // training time of the previous intervals
  };
  std::vector<Interval> intervals_;
  bool open_ = false;
};

}  // namespace reprise::detail
