#include "compat/fused_optimizer.h"

#include <ATen/ATen.h>
#include <torch/version.h>

// LibTorch 2.0 added Adam on CUDA, 2.3 SGD on CUDA and 2.4 both on the CPU. For
// simplicity, versions before 2.4 use the foreach operators.
#define REPRISE_HAS_FUSED     \
  (TORCH_VERSION_MAJOR > 2 || \
   (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4))

namespace reprise::compat {

bool has_fused_adam(c10::Device device) {
#if REPRISE_HAS_FUSED
  return device.is_cuda() || device.is_cpu();
#else
  static_cast<void>(device);
  return false;
#endif
}

bool has_fused_sgd(c10::Device device) {
  return has_fused_adam(device);
}

bool fits_fused(const at::Tensor& parameter) {
  return parameter.is_non_overlapping_and_dense() &&
         (parameter.scalar_type() == at::kFloat ||
          parameter.scalar_type() == at::kDouble);
}

#if REPRISE_HAS_FUSED

void fused_adam_(at::TensorList parameters, at::TensorList gradients,
                 at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                 at::TensorList steps, const FusedAdamOptions& options) {
  const auto update = [&](auto&& fused) {
    fused(parameters, gradients, exp_avgs, exp_avg_sqs,
          /*max_exp_avg_sqs=*/at::TensorList(), steps, options.lr,
          options.beta1, options.beta2, options.weight_decay, options.eps,
          /*amsgrad=*/false, /*maximize=*/false);
  };
  // Lambdas, because both operators are overloaded.
  if (options.decoupled) {
    update([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
  } else {
    update([](auto&&... arguments) { at::_fused_adam_(arguments...); });
  }
}

void fused_sgd_(at::TensorList parameters, at::TensorList gradients,
                at::TensorList momentums, const FusedSgdOptions& options) {
  at::_fused_sgd_(parameters, gradients, momentums, options.weight_decay,
                  options.momentum, options.lr, /*dampening=*/0.0,
                  options.nesterov, /*maximize=*/false,
                  /*is_first_step=*/false);
}

#else

void fused_adam_(at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                 at::TensorList, const FusedAdamOptions&) {
  TORCH_INTERNAL_ASSERT(false, "[fused_adam_] not available in this LibTorch");
}

void fused_sgd_(at::TensorList, at::TensorList, at::TensorList,
                const FusedSgdOptions&) {
  TORCH_INTERNAL_ASSERT(false, "[fused_sgd_] not available in this LibTorch");
}

#endif

}  // namespace reprise::compat
