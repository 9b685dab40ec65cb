#include "ops/kernels.h"

#include "compat/autocast.h"
#include "compat/cuda.h"
#include "ops/cuda/device.h"

namespace reprise::detail {

bool kernels_available(const torch::Device& device) {
  return device.is_cuda() && kernels::built();
}

bool kernels_available(const torch::Device& device, int compute_capability) {
  return kernels_available(device) &&
         kernels::compute_capability(device.has_index() ? device.index() : 0) ==
             compute_capability;
}

bool kernel_eligible(const torch::Tensor& x, const KernelOperand& required) {
  const bool single = required.type == KernelOperand::Type::kFloat32;
  return kernels_available(x.device()) &&
         (single ? is_float32(x) : is_half(x)) && x.dim() >= required.min_dim &&
         x.dim() <= required.max_dim && x.numel() > 0 && x.is_contiguous() &&
         (!required.ignores_autocast ||
          compat::autocast_type(x) == x.scalar_type());
}

bool is_float32(const torch::Tensor& tensor) {
  return tensor.defined() && tensor.scalar_type() == torch::kFloat;
}

bool is_half(const torch::Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == torch::kHalf ||
                              tensor.scalar_type() == torch::kBFloat16);
}

bool is_aligned(const torch::Tensor& tensor, int64_t elements) {
  const auto bytes = static_cast<uintptr_t>(elements) *
                     static_cast<uintptr_t>(tensor.element_size());
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % bytes == 0;
}

torch::Tensor as_aligned(const torch::Tensor& x, int64_t elements) {
  const torch::Tensor rows = x.contiguous();
  return is_aligned(rows, elements) ? rows : rows.clone();
}

kernels::DType kernel_dtype(const torch::Tensor& tensor) {
  if (!tensor.defined()) return kernels::DType::kNone;
  switch (tensor.scalar_type()) {
    case torch::kBFloat16:
      return kernels::DType::kBFloat16;
    case torch::kHalf:
      return kernels::DType::kFloat16;
    default:
      return kernels::DType::kFloat32;
  }
}

void* kernel_stream(const torch::Tensor& x) {
  return compat::current_cuda_stream(x.device().index());
}

float* float_data(const torch::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? tensor.data_ptr<float>()
                                                : nullptr;
}

}  // namespace reprise::detail
