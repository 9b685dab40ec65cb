#pragma once

#include "compat/timestamp.h"
#include "train/loop/time_audit.h"

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace reprise::detail {

/// Number of windows at the start that do not count for the speed: they fill
/// caches, allocate gradients and optimizer state, and the second is profiled.
constexpr int64_t kWarmUpWindows = 2;

/// Measures time and speed of a training. Evaluations and saves do not count;
/// see Pause. Tested by tests/train/loop/trainer_test.cpp.
class RunClock {
 public:
  using Clock = std::chrono::steady_clock;

  explicit RunClock(c10::Device device) : device_(device) {}

  /// Starts the clock. The run ends after `limit_s` seconds of training (0: no
  /// limit). `previous_s` is the training time before a resume. With
  /// `note_windows`, the end of each window is recorded for window_ms().
  void start(double limit_s, double previous_s, bool note_windows);

  /// Seconds of training in this process; does not wait for the device.
  double seconds() const;
  /// Seconds trained before a resume.
  double previous_seconds() const { return previous_s_; }
  double total_seconds() const { return previous_s_ + seconds(); }

  /// Stops the clock during its lifetime.
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

  /// Called after each window with totals of this process: `samples` trained,
  /// `captures` of CUDA graphs, and `waited_s` seconds of waiting for data. A
  /// capture takes longer than many steps, so the speed is measured after the
  /// last one. Returns true once, when the steady part begins.
  bool window_done(int64_t samples, int64_t captures, double waited_s);
  int64_t windows() const { return windows_; }
  /// Called before the first window and after each window. Records the time if
  /// start() was called with `note_windows`.
  void note_window_end();

  /// Speed of the steady part, or of all windows before it begins.
  double samples_per_s(int64_t samples) const;

  /// Checks the time limit at intervals, and waits for the device to do so. The
  /// run ends after `limit_s`, but not before half of it has been steady.
  void check_limit();
  bool time_is_up() const { return time_is_up_; }
  void set_time_is_up(bool up) { time_is_up_ = up; }

  /// Milliseconds of each recorded window; waits for the device.
  std::vector<double> window_ms() const;

  /// Reasons why the times may be misleading; see TimeAudit::doubts().
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
