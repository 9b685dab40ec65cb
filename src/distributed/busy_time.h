#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>
#include <utility>
#include <vector>

namespace reprise::detail {

/// Measures how long collectives were in progress. Thread-safe: the backend's
/// threads report to it. Tested by tests/distributed/reducer_test.cpp.
class BusyTime {
 public:
  using Clock = std::chrono::steady_clock;

  /// Adds an interval in which a collective was in progress.
  void note(Clock::time_point begin, Clock::time_point end) {
    const std::lock_guard lock(mutex_);
    spans_.emplace_back(begin, end);
  }

  /// Returns the seconds during which at least one collective was in progress, in
  /// total and after `mark`, and clears the intervals.
  std::pair<double, double> take(Clock::time_point mark) {
    std::vector<std::pair<Clock::time_point, Clock::time_point>> spans;
    {
      const std::lock_guard lock(mutex_);
      spans.swap(spans_);
    }
    std::sort(spans.begin(), spans.end());
    Clock::duration all{}, after{};
    Clock::time_point reached{};
    for (auto [begin, end] : spans) {
      begin = std::max(begin, reached);
      if (end <= begin) continue;
      all += end - begin;
      if (end > mark) after += end - std::max(begin, mark);
      reached = end;
    }
    return {std::chrono::duration<double>(all).count(),
            std::chrono::duration<double>(after).count()};
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<Clock::time_point, Clock::time_point>> spans_;
};

}  // namespace reprise::detail
