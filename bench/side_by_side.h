#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

/// Timing on noisy machines: two functions run alternately many times. The ratio of
/// adjacent runs is reported, which cancels slow drift.
namespace reprise::bench {

struct Spread {
  double low = 0, median = 0, high = 0;  ///< quartiles
};

inline Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double part) {
    return values[static_cast<size_t>(part *
                                      static_cast<double>(values.size() - 1))];
  };
  return {at(0.25), at(0.5), at(0.75)};
}

inline double milliseconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now() - start)
      .count();
}

struct SideBySide {
  Spread first_ms, second_ms, ratio;  ///< the ratio is second / first
};

/// Runs both functions `repeats` times after one warm-up, in alternating order. Each
/// must wait for its own work.
inline SideBySide side_by_side(const std::function<void()>& first,
                               const std::function<void()>& second,
                               int repeats) {
  first();
  second();
  std::vector<double> a, b, ratios;
  for (int i = 0; i < repeats; ++i) {
    double first_ms = 0, second_ms = 0;
    if (i % 2 == 0) {
      first_ms = milliseconds(first);
      second_ms = milliseconds(second);
    } else {
      second_ms = milliseconds(second);
      first_ms = milliseconds(first);
    }
    a.push_back(first_ms);
    b.push_back(second_ms);
    ratios.push_back(second_ms / first_ms);
  }
  return {spread_of(a), spread_of(b), spread_of(ratios)};
}

}  // namespace reprise::bench
