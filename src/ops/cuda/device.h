#pragma once

namespace reprise::detail::kernels {

/// Whether nvcc compiled the kernels into this build.
/// Tested by tests/ops/kernels_test.cpp.
bool built();

/// Compute capability of a CUDA device, such as 90 for 9.0; 0 if there is no such device
/// or the kernels are not built.
int compute_capability(int device);

/// Number of multiprocessors of a CUDA device; 0 as above.
int multiprocessors(int device);

}  // namespace reprise::detail::kernels
