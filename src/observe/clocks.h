#pragma once

#include <chrono>
#include <ctime>

namespace reprise::detail {

/// Seconds of CPU time: CLOCK_THREAD_CPUTIME_ID or CLOCK_PROCESS_CPUTIME_ID.
inline double cpu_seconds(clockid_t clock) {
  timespec time{};
  if (clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) +
         1e-9 * static_cast<double>(time.tv_nsec);
}

inline double steady_seconds() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Since the epoch; may jump. NVML's stamps are of this clock.
inline double realtime_seconds() {
  return std::chrono::duration<double>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

/// What is dear to read is read less often: after a read of d seconds of CPU
/// time there is none for 500 d, a fifth of a percent.
class Pace {
 public:
  Pace() = default;
  explicit Pace(double least_s) : least_s_(least_s) {}

  bool due(double now_s) const { return now_s >= next_s_; }
  void took(double now_s, double cpu_s) {
    const double pause_s = 500 * cpu_s;
    next_s_ = now_s + (pause_s > least_s_ ? pause_s : least_s_);
  }
  void reset() { next_s_ = 0; }

 private:
  double least_s_ = 0;
  double next_s_ = 0;
};

}  // namespace reprise::detail
