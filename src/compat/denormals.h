#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

namespace reprise::compat {

/// During its lifetime, denormal numbers (below 1.2e-38 in fp32) are flushed to
/// zero in CPU arithmetic: on the calling thread, on LibTorch's intra-op
/// threads and on OpenBLAS threads. Does nothing for other devices, inside
/// another such scope, and on CPUs that do not support it.
///
/// On many CPUs an operation on a denormal number takes more than a hundred
/// cycles, which would dominate the time of training with vanishing gradients.
///
/// The first scope of a process restarts the OpenBLAS threads, which flush
/// denormals from then on. No other thread may run a matrix product during
/// that.
class FlushDenormals {
 public:
  explicit FlushDenormals(c10::Device device);
  ~FlushDenormals();
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

  bool active() const { return active_; }

 private:
  bool active_ = false;
};

/// Returns whether arithmetic on the calling thread flushes denormal numbers.
bool flushes_denormals();

/// Returns the fraction of denormal numbers among the elements of the
/// contiguous fp32 CPU tensors in `tensors`. Large tensors are sampled.
/// Allocates no memory.
double denormal_share(const std::vector<at::Tensor>& tensors);

}  // namespace reprise::compat
