#pragma once

#include "libtorch.h"

#include <reprise/recompute/execution.h>

#include <functional>
#include <string>
#include <vector>

/// Helpers shared by several tests.
namespace reprise::testing {

/// The device to test on: REPRISE_TEST_DEVICE, or the CPU.
torch::Device device();

/// TensorOptions for device().
torch::TensorOptions on_device(torch::ScalarType type = torch::kFloat);

/// Succeeds if `a` and `b` are bit-identical on the CPU, or differ by at most 1e-5 of
/// the largest value on CUDA.
::testing::AssertionResult same(const torch::Tensor& a, const torch::Tensor& b);

/// same() for single-precision matrix products of which one is computed in slices.
/// Whether they are bit-identical depends on the BLAS library and the processor, and is
/// determined at run time: OpenBLAS's AVX-512 kernels are, its AVX2 kernels round
/// differently at tile edges. If they are not, allows 1e-5 of the largest value.
::testing::AssertionResult same_in_parts(const torch::Tensor& a,
                                         const torch::Tensor& b);

/// ‖a - b‖₂ / ‖a‖₂.
double relative_error(const torch::Tensor& a, const torch::Tensor& b);

/// The text of the c10::Error or reprise::Error that `body` throws; fails the test if it
/// throws neither.
std::string error_of(const std::function<void()>& body);

/// Records the operations of an execution.
struct Recorder : ExecutionObserver {
  void before(const Op& op) override;
  /// The number of forward runs of a stage.
  int runs(int stage) const;
  std::vector<Op> ops;
};

/// A chain of `count` equal stages, tanh(linear(x)), whose autograd graphs save only
/// their input and output.
Chain equal_stages(int count, int64_t width);

/// Returns copies of the gradients of `parameters` and clears them.
std::vector<torch::Tensor> take_gradients(
    std::vector<torch::Tensor> parameters);

}  // namespace reprise::testing
