#include "ops/norm_act.h"

#include "ops/kernels.h"

#include <reprise/ops/norm.h>
#include <reprise/ops/pool.h>

#include <torch/types.h>

namespace reprise::detail {
namespace {

using ops::NormActivation;
using ops::NormActOptions;
using torch::Tensor;

enum class NormLayout { kUnsupported, kPlanes, kRows };

NormLayout norm_layout(const Tensor& x, const Tensor& weight,
                       const Tensor& bias, const NormActOptions& options) {
  if (norm_planes_eligible(x, weight, bias, options)) {
    return NormLayout::kPlanes;
  }
  return norm_rows_eligible(x, weight, bias, options)
             ? NormLayout::kRows
             : NormLayout::kUnsupported;
}

/// x, or x in channels-last order if only that has kernels, as for images in half precision:
/// LibTorch's norms of planes take several times as long as the conversion.
Tensor in_supported_layout(const Tensor& x, const Tensor& weight,
                           const Tensor& bias, const NormActOptions& options) {
  if (x.dim() != 4 || x.size(1) % 8 != 0 || !is_half(x) ||
      !kernels_available(x.device()) ||
      norm_layout(x, weight, bias, options) != NormLayout::kUnsupported) {
    return x;
  }
  const Tensor rows = x.contiguous(at::MemoryFormat::ChannelsLast);
  return norm_layout(rows, weight, bias, options) == NormLayout::kRows ? rows
                                                                       : x;
}

Tensor run_norm(NormLayout layout, const Tensor& x, const Tensor& weight,
                const Tensor& bias, const NormSettings& settings,
                const NormActOptions& options) {
  return layout == NormLayout::kPlanes
             ? norm_act_planes(x, weight, bias, settings, options)
             : norm_act_rows(x, weight, bias, settings, options);
}

Tensor activate(Tensor x, NormActivation activation) {
  switch (activation) {
    case NormActivation::kNone:
      return x;
    case NormActivation::kRelu:
      return x.relu_();
    case NormActivation::kSilu:
      return torch::silu(x);
  }
  return x;
}

}  // namespace

Tensor forward_group_norm(torch::nn::GroupNormImpl& norm, const Tensor& x) {
  if (!is_half(x) || !is_float32(norm.weight)) return norm.forward(x);
  return norm.forward(x.to(torch::kFloat)).to(x.scalar_type());
}

Tensor activate_normalized(Tensor normalized, const NormActOptions& options) {
  if (options.residual.defined()) normalized.add_(options.residual);
  if (!options.pool) return activate(normalized, options.activation);
  const bool relu = options.activation == NormActivation::kRelu;
  if (options.compact_pool) {
    return relu ? ops::relu_max_pool2d(normalized, *options.pool)
                : ops::max_pool2d(activate(normalized, options.activation),
                                  *options.pool);
  }
  // The ReLU commutes with the maximum, and after the pool it has fewer values.
  return relu ? ops::fallback::max_pool2d(normalized, *options.pool).relu_()
              : ops::fallback::max_pool2d(
                    activate(normalized, options.activation), *options.pool);
}

Tensor batch_norm_act(const BatchNormState& norm, const Tensor& given,
                      const NormActOptions& options) {
  const Tensor x = in_supported_layout(given, norm.weight, norm.bias, options);
  const NormLayout layout = norm_layout(x, norm.weight, norm.bias, options);
  // LibTorch rejects one value per channel with an error.
  if (layout == NormLayout::kUnsupported || !norm.momentum ||
      x.numel() == x.size(1)) {
    return {};
  }
  NormSettings settings;
  settings.epsilon = norm.eps;
  if (norm.running_mean.defined()) {
    const torch::NoGradGuard no_grad;
    Tensor(norm.num_batches_tracked).add_(1);
    settings.running_mean = norm.running_mean;
    settings.running_variance = norm.running_var;
    settings.momentum = *norm.momentum;
  }
  return run_norm(layout, x, norm.weight, norm.bias, settings, options);
}

Tensor group_norm_act(const torch::nn::GroupNormImpl& norm, const Tensor& given,
                      const NormActOptions& options) {
  const Tensor x = in_supported_layout(given, norm.weight, norm.bias, options);
  const NormLayout layout = norm_layout(x, norm.weight, norm.bias, options);
  if (layout == NormLayout::kUnsupported) return {};
  NormSettings settings;
  settings.groups = norm.options.num_groups();
  settings.epsilon = norm.options.eps();
  return run_norm(layout, x, norm.weight, norm.bias, settings, options);
}

}  // namespace reprise::detail
