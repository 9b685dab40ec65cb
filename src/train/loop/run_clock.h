#pragma once

#include "compat/timestamp.h"
#include "train/loop/time_audit.h"

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace reprise::detail {

/// Windows at the beginning that do not count for the speed: they fill caches, create
/// gradients and optimizer state, and the second one is profiled.
constexpr int64_t kWarmUpWindows = 2;

/// Time and speed of a training. Evaluations and saves are left out (Pause).
class RunClock {
 public:
  using Clock = std::chrono::steady_clock;

  explicit RunClock(c10::Device device) : device_(device) {}

  /// `limit_s`: training time after which the run ends; 0: none. `previous_s`: trained
  /// before a resume. `note_windows`: keep the end of each window.
  void start(double limit_s, double previous_s, bool note_windows);

  /// Seconds of training in this process; does not wait for the device.
  double seconds() const;
  /// Seconds trained before a resume.
  double previous_seconds() const { return previous_s_; }
  double total_seconds() const { return previous_s_ + seconds(); }

  /// Stops the clock while it lives.
  class Pause {
   public:
    explicit Pause(RunClock& clock) : clock_(clock) {}
    ~Pause() { clock_.paused_s_ += since(began_); }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    RunClock& clock_;
    Clock::time_point began_ = Clock::now();
  };

  /// After each window: `samples` trained so far by this process, `captures` of CUDA
  /// graphs so far, `waited_s` for data. A capture takes longer than many steps, so the
  /// speed counts from after it. Returns true when the steady part begins, the first time.
  bool window_done(int64_t samples, int64_t captures, double waited_s);
  int64_t windows() const { return windows_; }
  /// Keeps the time for window_ms(), if asked to: before the first window and after each.
  void note_window_end();

  /// Steady speed, or that of all windows while there is none yet.
  double samples_per_s(int64_t samples) const;

  /// Looks at the clock from time to time; waits for the device then. The run ends after
  /// `limit_s`, but not before half of it has been steady.
  void check_limit();
  bool time_is_up() const { return time_is_up_; }
  void set_time_is_up(bool up) { time_is_up_ = up; }

  /// Duration of each window of a short run; waits for the device.
  std::vector<double> window_ms() const;

  std::vector<std::string> doubts(double waited_s, double denormal_share) const;

  void wait_for_device() const;
  static double since(Clock::time_point when) {
    return std::chrono::duration<double>(Clock::now() - when).count();
  }

 private:
  bool steady() const;

  c10::Device device_;
  Clock::time_point began_;
  double limit_s_ = 0;
  double previous_s_ = 0;
  double paused_s_ = 0;
  int64_t windows_ = 0;
  bool note_windows_ = false;
  std::vector<compat::Timestamp> window_ends_;
  int64_t captures_seen_ = 0;
  int64_t steady_from_windows_ = 0;  // 0: not steady yet
  int64_t steady_from_samples_ = 0;
  double steady_from_s_ = 0;
  Clock::time_point next_check_;
  bool time_is_up_ = false;
  TimeAudit audit_;
};

}  // namespace reprise::detail
