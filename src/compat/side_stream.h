#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace reprise::compat {

/// Runs `work` on a second CUDA stream, concurrently with the rest of a backward, so that
/// two operations that are each too small for the device share it. To be called by the
/// backward of an autograd function.
///
/// `work` may read `used` and everything that existed before, and write what nothing else
/// in the backward accesses, such as the gradient of a weight with a single use. The
/// backward waits for it at the next call and at its end; until then `used` is kept alive.
///
/// Has this effect only while the backward is captured into a CudaGraph, where `work`
/// becomes a branch of the graph. Otherwise `work` runs on the current stream: operations
/// that are launched one by one wait for the CPU if they are small, and fill the device by
/// themselves if they are large. Tested by tests/train/step/graph_cuda_test.cpp.
void run_on_side_stream(std::vector<at::Tensor> used,
                        const std::function<void()>& work);

/// Announces a capture: while one of these exists with `expected`, the first call of
/// run_on_side_stream() uses the second stream outside of a capture too. This allocates
/// what libraries keep per stream (cuBLAS workspaces), which a capture must not do.
class CaptureExpected {
 public:
  explicit CaptureExpected(bool expected);
  ~CaptureExpected();
  CaptureExpected(const CaptureExpected&) = delete;
  CaptureExpected& operator=(const CaptureExpected&) = delete;

 private:
  bool expected_;
};

/// Must be called after the per-stream workspaces of libraries are freed, as by
/// release_workspaces(). The next CaptureExpected allocates them again.
void reset_side_streams();

}  // namespace reprise::compat
