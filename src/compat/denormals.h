#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

namespace reprise::compat {

/// Flushes denormal numbers (below 1.2e-38 in fp32) to zero in all arithmetic of the
/// CPU, for as long as it lives: on the calling thread, on LibTorch's intra-op threads
/// and on OpenBLAS's. Does nothing for another device, inside another such scope, and
/// on processors that cannot.
///
/// Many processors take over a hundred cycles for an operation on a denormal, so a
/// training whose gradients vanish would be timed by its denormals.
///
/// OpenBLAS starts its threads anew when the first scope of a process opens, and they
/// flush for good: no other thread may run a matrix product at that moment.
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

/// Whether arithmetic on the calling thread flushes denormal numbers.
bool flushes_denormals();

/// Share of denormal numbers among the values of the contiguous fp32 tensors on the CPU;
/// large ones are sampled. Allocates nothing.
double denormal_share(const std::vector<at::Tensor>& tensors);

}  // namespace reprise::compat
