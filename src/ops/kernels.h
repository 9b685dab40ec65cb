#pragma once

#include "ops/cuda/dtype.h"

#include <torch/types.h>

#include <cstdint>
#include <limits>

/// Whether an operator can use its CUDA kernel. Each operator checks its main operand with
/// kernel_eligible(), then what is specific to it, and otherwise calls its fallback.
namespace reprise::detail {

/// Whether this build has CUDA kernels and `device` can run them.
bool kernels_available(const torch::Device& device);

/// The same for kernels that are compiled for one compute capability, such as 90 for 9.0.
bool kernels_available(const torch::Device& device, int compute_capability);

/// Requirements of a kernel on its main operand.
struct KernelOperand {
  enum class Type { kFloat32, kHalf };  ///< kHalf: float16 or bfloat16
  Type type = Type::kFloat32;
  int64_t min_dim = 1;
  int64_t max_dim = std::numeric_limits<int64_t>::max();
  /// The kernel has no half-precision variant: not eligible if autocast would convert x.
  bool ignores_autocast = false;
};

/// Whether x is on a device with kernels, not empty, contiguous, and meets `required`.
bool kernel_eligible(const torch::Tensor& x, const KernelOperand& required);

/// Whether `tensor` is defined and float32.
bool is_float32(const torch::Tensor& tensor);
/// Whether `tensor` is defined and float16 or bfloat16.
bool is_half(const torch::Tensor& tensor);

/// Whether the first element of `tensor` is at a multiple of `elements` elements in memory,
/// as accesses to that many at a time require.
bool is_aligned(const torch::Tensor& tensor, int64_t elements);

/// x itself if it is contiguous and is_aligned(); otherwise a copy.
torch::Tensor as_aligned(const torch::Tensor& x, int64_t elements);

/// Element type for kernels: float32, float16 or bfloat16; kNone if undefined.
kernels::DType kernel_dtype(const torch::Tensor& tensor);

/// This thread's current stream on the device of x, a cudaStream_t.
void* kernel_stream(const torch::Tensor& x);

/// Pointer to the data of a float32 tensor; null if it is undefined or empty.
float* float_data(const torch::Tensor& tensor);

}  // namespace reprise::detail
