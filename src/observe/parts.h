#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

namespace reprise::detail {

/// The parts of a training as stretches of one clock.
class Parts {
 public:
  bool empty() const { return parts_.empty(); }

  /// A clock that jumps back must not make parts overlap.
  void open(double now_s) {
    close(now_s);
    const double before_s =
        empty() ? 0 : training_s(std::numeric_limits<double>::infinity());
    const double from_s = empty() ? now_s : std::max(now_s, parts_.back().to_s);
    parts_.push_back(
        {from_s, std::numeric_limits<double>::infinity(), before_s});
    open_ = true;
  }
  void close(double now_s) {
    if (!open_) return;
    parts_.back().to_s = std::max(parts_.back().from_s, now_s);
    open_ = false;
  }

  /// Of the last part; none while it lasts.
  std::optional<double> end_s() const {
    if (empty() || open_) return std::nullopt;
    return parts_.back().to_s;
  }

  /// How much of the training lies before a moment.
  double training_s(double at_s) const {
    // Moments that are asked for are mostly recent.
    for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
      if (at_s > part->from_s) {
        return part->before_s + std::min(at_s, part->to_s) - part->from_s;
      }
    }
    return 0;
  }

 private:
  struct Part {
    double from_s = 0, to_s = 0;
    double before_s = 0;  // training in the parts before
  };
  std::vector<Part> parts_;
  bool open_ = false;
};

}  // namespace reprise::detail
