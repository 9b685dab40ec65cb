#pragma once

#include "compat/timestamp.h"

#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <vector>

/// Timing of stages in measure_stage_costs(). Tested by
/// tests/recompute/stage_costs_test.cpp.
namespace reprise {

/// Keeps a CUDA device busy while the host launches the work to be timed.
/// Otherwise the time of a short stage would include the wait for its launch.
/// Does nothing on the CPU.
class DeviceSpinner {
 public:
  explicit DeviceSpinner(torch::Device device) : device_(device) {
    if (!device.is_cuda()) return;
    constexpr int64_t kCycles = 1'000'000;
    compat::spin_cuda(device.index(), kCycles);
    const compat::CudaEvent start(device.index());
    compat::spin_cuda(device.index(), kCycles);
    const compat::CudaEvent end(device.index());
    cycles_per_ms_ = kCycles / end.milliseconds_since(start);
  }

  /// Keeps the current stream busy for about `ms` milliseconds. Allocates no
  /// memory.
  void spin(double ms) {
    if (!device_.is_cuda()) return;
    compat::spin_cuda(device_.index(),
                      static_cast<int64_t>(ms * cycles_per_ms_) + 1);
  }

 private:
  torch::Device device_;
  double cycles_per_ms_ = 0;
};

/// Times of the runs of one stage, in milliseconds.
struct StageTimes {
  std::vector<double> forward, backward, forward_launch, backward_launch;

  void add(const compat::Timestamp& start, const compat::Timestamp& middle,
           const compat::Timestamp& back, const compat::Timestamp& end,
           bool on_device) {
    forward.push_back(middle.ms_since(start));
    backward.push_back(end.ms_since(back));
    if (!on_device) return;
    forward_launch.push_back(middle.host_ms_since(start));
    backward_launch.push_back(end.host_ms_since(back));
  }
  double last_ms() const {
    const double device = forward.back() + backward.back();
    if (forward_launch.empty()) return device;
    return std::max(device, forward_launch.back() + backward_launch.back());
  }
  double last_launch_ms() const {
    if (forward_launch.empty()) return 0;
    return forward_launch.back() + backward_launch.back();
  }
  void clear() { *this = {}; }
};

inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle =
      values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace reprise
