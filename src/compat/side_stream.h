#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace reprise::compat {

/// For a function of autograd, in its backward, while that is being captured into a
/// CudaGraph: runs `work` as a branch of the graph, beside what follows in the backward,
/// so that two things that are each too small for the device share it. `work` may read
/// `used` and whatever was there before, and write what nothing else in the backward
/// touches, such as the gradient of a weight that has one use. The backward waits for
/// it where the next such work begins, and at its end; until then `used` is held.
///
/// Elsewhere `work` simply runs: launched one by one, small things wait for the host,
/// and large ones need no company.
void run_beside(std::vector<at::Tensor> used,
                const std::function<void()>& work);

/// A capture is to come: while one of these lives with `expected`, the first work of
/// run_beside() goes to the second stream outside a capture too. That sets up what
/// libraries keep for each stream (cuBLAS's workspaces), where a capture could not.
class CaptureExpected {
 public:
  explicit CaptureExpected(bool expected);
  ~CaptureExpected();
  CaptureExpected(const CaptureExpected&) = delete;
  CaptureExpected& operator=(const CaptureExpected&) = delete;

 private:
  bool expected_;
};

/// What libraries kept for the streams is gone; the next capture that is expected has
/// it set up again. Called by release_workspaces().
void forget_streams_beside();

}  // namespace reprise::compat
