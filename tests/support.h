#pragma once

#include "libtorch.h"

#include <reprise/recompute/execution.h>

#include <functional>
#include <string>
#include <vector>

/// What several tests need.
namespace reprise::testing {

/// The device to test on: REPRISE_TEST_DEVICE, or the CPU.
torch::Device device();

/// `TensorOptions` on that device.
torch::TensorOptions on_device(torch::ScalarType type = torch::kFloat);

/// Equal in every bit on the CPU; within 1e-5 of the largest value on CUDA.
::testing::AssertionResult same(const torch::Tensor& a, const torch::Tensor& b);

/// same(), for results of matrix products in single precision that one computes
/// whole and the other in parts. Whether they can be equal in every bit depends on
/// the library and on the processor, which is tried: OpenBLAS's AVX-512 kernels
/// are so, those for AVX2 round differently at the edges of tiles. Where they
/// cannot, within 1e-5 of the largest value.
::testing::AssertionResult same_in_parts(const torch::Tensor& a,
                                         const torch::Tensor& b);

/// |a - b| / |a|, 2-norms.
double relative_error(const torch::Tensor& a, const torch::Tensor& b);

/// The text of the c10::Error or reprise::Error that `body` throws; fails the test if it
/// throws neither.
std::string error_of(const std::function<void()>& body);

/// Counts the forward runs and keeps the operations.
struct Recorder : ExecutionObserver {
  void before(const Op& op) override;
  int runs(int stage) const;
  std::vector<Op> ops;
};

/// A chain of `count` equal stages, tanh(linear(x)), whose graphs save just
/// their input and output.
Chain equal_stages(int count, int64_t width);

/// Gradients of `parameters`, copied, and cleared.
std::vector<torch::Tensor> take_gradients(
    std::vector<torch::Tensor> parameters);

}  // namespace reprise::testing
