#include "ops/adam_update.h"

#include "ops/cuda/adam.h"
#include "ops/kernels.h"

#include <reprise/ops/weight_copies.h>

#include <cmath>

namespace reprise::detail {
namespace {

using torch::Tensor;

/// The copy of `weight` if the kernel can write it.
Tensor copy_to_write(const Tensor& weight) {
  const Tensor copy = WeightCopies::memory_of(weight);
  const bool same_order = copy.defined() && is_half(copy) &&
                          weight.is_contiguous() && copy.is_contiguous();
  return same_order && is_aligned(copy, 4) ? copy : Tensor();
}

}  // namespace

bool adam_update_eligible(const AdamParameter& entry) {
  const Tensor& parameter = entry.parameter;
  if (!kernels_available(parameter.device()) ||
      !parameter.is_non_overlapping_and_dense()) {
    return false;
  }
  for (const Tensor& tensor :
       {parameter, entry.gradient, entry.mean, entry.square}) {
    if (!is_float32(tensor) || tensor.strides() != parameter.strides() ||
        !is_aligned(tensor, 4)) {
      return false;
    }
  }
  return true;
}

std::array<double, 3> adam_step_values(const AdamSettings& settings,
                                       int64_t count) {
  const auto t = static_cast<double>(count);
  return {settings.lr / (1 - std::pow(settings.beta1, t)),
          std::sqrt(1 - std::pow(settings.beta2, t)),
          settings.decoupled ? 1 - settings.lr * settings.weight_decay : 1.0};
}

void mark_adam_updated(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> copied;
  for (const Tensor& parameter : parameters) {
    parameter.unsafeGetTensorImpl()->bump_version();
    if (copy_to_write(parameter).defined() ||
        WeightCopies::is_split(parameter)) {
      copied.push_back(parameter);
    }
  }
  WeightCopies::mark_current(copied);
}

void adam_update(const std::vector<AdamParameter>& parameters,
                 const AdamSettings& settings) {
  kernels::AdamUpdate launch;
  launch.beta1 = static_cast<float>(settings.beta1);
  launch.beta2 = static_cast<float>(settings.beta2);
  launch.rest1 = static_cast<float>(1 - settings.beta1);
  launch.rest2 = static_cast<float>(1 - settings.beta2);
  launch.epsilon = static_cast<float>(settings.eps);
  launch.keep = static_cast<float>(adam_step_values(settings, 1)[2]);
  if (!settings.decoupled) {
    launch.decay = static_cast<float>(settings.weight_decay);
  }
  std::vector<Tensor> copied;
  const auto flush = [&](const Tensor& any) {
    if (launch.count > 0) kernels::adam_update(launch, kernel_stream(any));
    launch.count = 0;
  };
  for (const AdamParameter& entry : parameters) {
    const Tensor copy = copy_to_write(entry.parameter);
    // All copies of a launch have one type.
    const bool other_type =
        copy.defined() && kernel_dtype(copy) != launch.copy_type;
    if (launch.count == kernels::AdamUpdate::kMaxTensors || other_type) {
      flush(entry.parameter);
    }
    if (other_type) launch.copy_type = kernel_dtype(copy);
    auto& tensor = launch.tensors[launch.count++];
    tensor.parameter = float_data(entry.parameter);
    tensor.gradient = float_data(entry.gradient);
    tensor.mean = float_data(entry.mean);
    tensor.square = float_data(entry.square);
    tensor.copy = copy.defined() ? copy.data_ptr() : nullptr;
    tensor.size = entry.parameter.numel();
    const bool split = WeightCopies::is_split(entry.parameter);
    tensor.split_fours =
        split ? static_cast<unsigned>(entry.parameter.size(1) / 4) : 0;
    const auto values = adam_step_values(settings, entry.count);
    tensor.rate = static_cast<float>(values[0]);
    tensor.root = static_cast<float>(values[1]);
    tensor.step_values = entry.step_values;
    // Autograd and the copies recognise a change by the version.
    entry.parameter.unsafeGetTensorImpl()->bump_version();
    if (copy.defined() || split) copied.push_back(entry.parameter);
  }
  if (!parameters.empty()) flush(parameters.back().parameter);
  WeightCopies::mark_current(copied);
}

}  // namespace reprise::detail
