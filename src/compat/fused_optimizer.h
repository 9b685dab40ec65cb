#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

/// LibTorch's fused optimizer updates, which update a list of tensors with one
/// kernel and without temporaries. If `has_fused_…()` returns false, the update
/// is not available and must not be called.
///
/// All lists have the same length. Their tensors are on one device and of one
/// floating-point type. Tensors with the same index have equal strides and are
/// dense (see `fits_fused()`). Tested by tests/train/optim/optimizer_test.cpp.
namespace reprise::compat {

/// Return whether this LibTorch has a fused update for tensors on `device`:
/// since version 2.4 for CPU and CUDA.
bool has_fused_adam(c10::Device device);
bool has_fused_sgd(c10::Device device);

/// Returns whether a fused update supports `parameter`: dense, and float or
/// double.
bool fits_fused(const at::Tensor& parameter);

struct FusedAdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  /// AdamW if true; else weight decay is added to the gradient.
  bool decoupled = true;
};

/// Updates `parameters`, `exp_avgs` and `exp_avg_sqs` in place. `steps` holds
/// the number of each tensor's update, counted from 1, as float scalars on the
/// device. They are not modified and may be the same tensor.
void fused_adam_(at::TensorList parameters, at::TensorList gradients,
                 at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                 at::TensorList steps, const FusedAdamOptions& options);

struct FusedSgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

/// Updates `parameters` and `momentums` in place. `momentums` are zeros before
/// the first update; the list is empty if momentum is 0.
void fused_sgd_(at::TensorList parameters, at::TensorList gradients,
                at::TensorList momentums, const FusedSgdOptions& options);

}  // namespace reprise::compat
