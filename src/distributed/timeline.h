#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>
#include <utility>
#include <vector>

namespace reprise::detail {

/// When collectives were under way, told by the backend's threads.
class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  void note(Clock::time_point begin, Clock::time_point end) {
    const std::lock_guard lock(mutex_);
    spans_.emplace_back(begin, end);
  }

  /// Seconds that any was, in all and after `mark`. Forgets them.
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
