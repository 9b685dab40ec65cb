#pragma once

#include "compat/timestamp.h"

#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <vector>

/// How measure_stage_costs() times a stage: on the device's clock while the device is kept busy.
namespace reprise {

/// Work that keeps a device busy while the host starts what is to be timed:
/// otherwise a short stage would be timed together with the wait for its launch.
class Filler {
 public:
  explicit Filler(torch::Device device) : device_(device) {
    if (!device.is_cuda()) return;
    constexpr int64_t kCycles = 1'000'000;
    compat::spin_cuda(device.index(), kCycles);
    const compat::CudaMoment start(device.index());
    compat::spin_cuda(device.index(), kCycles);
    const compat::CudaMoment end(device.index());
    cycles_per_ms_ = kCycles / end.milliseconds_since(start);
  }

  /// So many milliseconds of it. Takes no memory, nor makes a library take some.
  void fill(double ms) {
    if (!device_.is_cuda()) return;
    compat::spin_cuda(device_.index(),
                      static_cast<int64_t>(ms * cycles_per_ms_) + 1);
  }

 private:
  torch::Device device_;
  double cycles_per_ms_ = 0;
};

/// Times of the runs of one stage.
struct StageTimes {
  std::vector<double> forward, backward, forward_host, backward_host;

  void add(const compat::Timestamp& start, const compat::Timestamp& middle,
           const compat::Timestamp& back, const compat::Timestamp& end,
           bool on_device) {
    forward.push_back(middle.ms_since(start));
    backward.push_back(end.ms_since(back));
    if (!on_device) return;
    forward_host.push_back(middle.host_ms_since(start));
    backward_host.push_back(end.host_ms_since(back));
  }
  double last_ms() const {
    const double device = forward.back() + backward.back();
    if (forward_host.empty()) return device;
    return std::max(device, forward_host.back() + backward_host.back());
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
