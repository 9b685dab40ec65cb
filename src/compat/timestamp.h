#pragma once

#include "compat/cuda.h"

#include <c10/core/Device.h>

#include <chrono>
#include <optional>

namespace reprise::compat {

/// A point in time on the host and, on CUDA, on the device's current stream.
/// Construction does not block. Tested by tests/recompute/host_memory_cuda_test.cpp.
class Timestamp {
 public:
  explicit Timestamp(c10::Device device) : host_(Clock::now()) {
    if (device.is_cuda()) device_.emplace(device.index());
  }

  /// Returns the host time since `earlier`, in milliseconds.
  double host_ms_since(const Timestamp& earlier) const {
    return std::chrono::duration<double, std::milli>(host_ - earlier.host_)
        .count();
  }

  /// Returns the device time since `earlier`, in milliseconds. Blocks until the
  /// device has reached this point. On the CPU, returns the host time.
  double ms_since(const Timestamp& earlier) const {
    return device_ ? device_->milliseconds_since(*earlier.device_)
                   : host_ms_since(earlier);
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point host_;
  std::optional<CudaEvent> device_;
};

}  // namespace reprise::compat
