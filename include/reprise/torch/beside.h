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
/// and large ones need no company. (Once a stream it goes to the second stream there
/// too, so that what libraries keep a stream is set up before a capture.)
void run_beside(std::vector<at::Tensor> used,
                const std::function<void()>& work);

}  // namespace reprise::compat
