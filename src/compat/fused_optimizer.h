#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

/// LibTorch's fused optimizer updates: one kernel for a list of tensors, without
/// temporaries. They came to the C++ interface bit by bit; where a build lacks
/// one, `has_…` says so and the update must not be called.
///
/// All lists are parallel, on one device, of one floating type; tensors of one
/// place have the same strides and are dense (`fits_fused()`).
namespace reprise::compat {

/// Whether this LibTorch has a fused update for tensors on `device`: from 2.4
/// on for CPU and CUDA, never before.
bool has_fused_adam(c10::Device device);
bool has_fused_sgd(c10::Device device);

/// Whether a fused update can take `parameter`: dense, float or double.
bool fits_fused(const at::Tensor& parameter);

struct FusedAdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled = true;  ///< AdamW; else the decay is added to the gradient
};

/// `steps`: the number of each tensor's update, from 1, as float scalars on the
/// device. They are only read, and places may share one.
void fused_adam_(at::TensorList parameters, at::TensorList gradients,
                 at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                 at::TensorList steps, const FusedAdamOptions& options);

struct FusedSgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

/// `momentums` start as zeros; empty without momentum.
void fused_sgd_(at::TensorList parameters, at::TensorList gradients,
                at::TensorList momentums, const FusedSgdOptions& options);

}  // namespace reprise::compat
