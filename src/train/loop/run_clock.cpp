#include "train/loop/run_clock.h"

#include "compat/cuda.h"

#include <algorithm>
#include <utility>

namespace reprise::detail {
namespace {

constexpr auto kCheckEvery = std::chrono::milliseconds(100);

}  // namespace

void RunClock::start(double limit_s, double previous_s, bool note_windows) {
  limit_s_ = limit_s;
  previous_s_ = previous_s;
  note_windows_ = note_windows;
  began_ = next_check_ = Clock::now();
}

double RunClock::seconds() const {
  return since(began_) - paused_s_;
}

bool RunClock::window_done(int64_t samples, int64_t captures, double waited_s) {
  ++windows_;
  const bool captured = std::exchange(captures_seen_, captures) != captures;
  if (windows_ < kWarmUpWindows) return false;
  if (windows_ > kWarmUpWindows && !captured) return false;
  wait_for_device();
  const bool first = steady_from_windows_ == 0;
  steady_from_windows_ = windows_;
  steady_from_s_ = seconds();
  steady_from_samples_ = samples;
  audit_.start(seconds(), waited_s);
  return first;
}

void RunClock::note_window_end() {
  if (note_windows_) window_ends_.emplace_back(device_);
}

bool RunClock::steady() const {
  return steady_from_windows_ > 0 &&
         windows_ >= steady_from_windows_ + kWarmUpWindows;
}

double RunClock::samples_per_s(int64_t samples) const {
  const double since = steady() ? steady_from_s_ : 0;
  const int64_t from = steady() ? steady_from_samples_ : 0;
  return static_cast<double>(samples - from) /
         std::max(seconds() - since, 1e-9);
}

void RunClock::check_limit() {
  if (limit_s_ <= 0 || !steady()) return;
  // Waiting after each window would keep the host from running ahead of a GPU.
  if (Clock::now() < next_check_) return;
  wait_for_device();
  // The capture of a CUDA graph may take longer than the whole limit.
  const double left_s = std::max(limit_s_ - seconds(),
                                 limit_s_ / 2 - (seconds() - steady_from_s_));
  time_is_up_ = left_s <= 0;
  next_check_ = Clock::now() +
                std::min<Clock::duration>(
                    kCheckEvery, std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(left_s)));
}

std::vector<double> RunClock::window_ms() const {
  std::vector<double> ms;
  for (size_t i = 1; i < window_ends_.size(); ++i) {
    ms.push_back(window_ends_[i].ms_since(window_ends_[i - 1]));
  }
  return ms;
}

std::vector<std::string> RunClock::doubts(double waited_s,
                                          double denormal_share) const {
  return audit_.doubts({seconds(), waited_s, denormal_share, device_});
}

void RunClock::wait_for_device() const {
  compat::synchronize(device_);
}

}  // namespace reprise::detail
