#pragma once

#include <chrono>
#include <ctime>

namespace reprise::detail {

/// CPU time in seconds. `clock` is CLOCK_THREAD_CPUTIME_ID or
/// CLOCK_PROCESS_CPUTIME_ID. Tested by tests/observe/process_probe_test.cpp.
inline double cpu_seconds(clockid_t clock) {
  timespec time{};
  if (clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) +
         1e-9 * static_cast<double>(time.tv_nsec);
}

/// Seconds of a monotonic clock.
inline double steady_seconds() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Seconds since the epoch; may jump. NVML's timestamps use this clock.
inline double realtime_seconds() {
  return std::chrono::duration<double>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

/// Limits the cost of expensive reads: after a read that took d seconds of CPU time,
/// the next one is due after 500 d, which is 0.2 % of the time.
class RateLimiter {
 public:
  RateLimiter() = default;
  /// `min_interval_s`: minimum time between reads.
  explicit RateLimiter(double min_interval_s)
      : min_interval_s_(min_interval_s) {}

  bool due(double now_s) const { return now_s >= next_s_; }
  void record(double now_s, double cpu_s) {
    const double pause_s = 500 * cpu_s;
    next_s_ = now_s + (pause_s > min_interval_s_ ? pause_s : min_interval_s_);
  }
  void reset() { next_s_ = 0; }

 private:
  double min_interval_s_ = 0;
  double next_s_ = 0;
};

}  // namespace reprise::detail
