#pragma once

#include "compat/cuda.h"

#include <c10/core/Device.h>

#include <chrono>
#include <optional>

namespace reprise::compat {

/// A moment on the host and, on CUDA, on the device's current stream. Taking it
/// does not wait.
class Timestamp {
 public:
  explicit Timestamp(c10::Device device) : host_(Clock::now()) {
    if (device.is_cuda()) device_.emplace(device.index());
  }

  double host_ms_since(const Timestamp& earlier) const {
    return std::chrono::duration<double, std::milli>(host_ - earlier.host_)
        .count();
  }

  /// The device's own time; waits for it.
  double ms_since(const Timestamp& earlier) const {
    return device_ ? device_->milliseconds_since(*earlier.device_)
                   : host_ms_since(earlier);
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point host_;
  std::optional<CudaMoment> device_;
};

}  // namespace reprise::compat
