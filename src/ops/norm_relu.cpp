#include "ops/cuda/norm_relu.h"

#include "compat/autocast.h"
#include "compat/cuda.h"

#include <reprise/ops/max_pool.h>
#include <reprise/ops/norm_relu.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <limits>

namespace reprise {
namespace {

using kernels::NormRunning;
using kernels::NormShape;
using kernels::NormTensors;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

NormTensors tensors_of(const Tensor& x, const Tensor& weight,
                       const Tensor& bias, const Tensor& mean,
                       const Tensor& inverse_deviation) {
  return {x.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(),
          mean.data_ptr<float>(), inverse_deviation.data_ptr<float>()};
}

void* norm_stream(const Tensor& x) {
  return compat::current_cuda_stream(x.device().index());
}

struct NormSettings {
  int64_t groups = 0;
  bool pool = false;
  double epsilon = 0;
  Tensor running_mean, running_variance;  // undefined: none
  double momentum = 0;

  NormShape shape_of(const Tensor& x) const {
    NormShape shape;
    shape.samples = x.size(0);
    shape.channels = x.size(1);
    shape.height = x.size(2);
    shape.width = x.size(3);
    shape.groups = groups;
    shape.pool = pool;
    return shape;
  }
};

class NormReluOperator : public torch::autograd::Function<NormReluOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& weight, const Tensor& bias,
                        const NormSettings& settings) {
    const NormShape shape = settings.shape_of(x);
    const auto options = x.options();
    const Tensor mean = torch::empty({shape.statistics()}, options);
    const Tensor inverse = torch::empty_like(mean);
    const Tensor scratch = torch::empty({shape.scratch()}, options);
    Tensor y, places;
    if (settings.pool) {
      y = torch::empty({shape.samples, shape.channels, shape.pooled_height(),
                        shape.pooled_width()},
                       options);
      places = torch::empty(y.sizes(), options.dtype(torch::kUInt8));
    } else {
      y = torch::empty_like(x);
    }
    NormRunning running;
    if (settings.running_mean.defined()) {
      running = {settings.running_mean.data_ptr<float>(),
                 settings.running_variance.data_ptr<float>(),
                 settings.momentum};
    }
    kernels::norm_forward(
        shape, tensors_of(x, weight, bias, mean, inverse), running,
        settings.epsilon, scratch.data_ptr<float>(), y.data_ptr<float>(),
        settings.pool ? places.data_ptr<uint8_t>() : nullptr, norm_stream(x));
    variable_list saved = {x, weight, bias, mean, inverse};
    if (settings.pool) saved.push_back(places);
    context->save_for_backward(saved);
    context->saved_data["groups"] = settings.groups;
    return y;
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    TORCH_CHECK(!torch::GradMode::is_enabled(),
                "[lean_norm_relu] has no second derivative");
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &bias = saved[2];
    NormSettings settings;
    settings.groups = context->saved_data["groups"].toInt();
    settings.pool = saved.size() > 5;
    const NormShape shape = settings.shape_of(x);
    const Tensor dy = gradients[0].contiguous();
    const Tensor scratch = torch::empty({shape.scratch()}, x.options());
    const Tensor sums = torch::empty({2 * shape.statistics()}, x.options());
    const Tensor dx =
        context->needs_input_grad(0) ? torch::empty_like(x) : Tensor();
    const Tensor dweight = torch::empty_like(weight);
    const Tensor dbias = torch::empty_like(bias);
    kernels::norm_backward(
        shape, tensors_of(x, weight, bias, saved[3], saved[4]),
        dy.data_ptr<float>(),
        settings.pool ? saved[5].data_ptr<uint8_t>() : nullptr,
        scratch.data_ptr<float>(), sums.data_ptr<float>(),
        dx.defined() ? dx.data_ptr<float>() : nullptr,
        dweight.data_ptr<float>(), dbias.data_ptr<float>(), norm_stream(x));
    return {dx, dweight, dbias, {}};
  }
};

/// Whether the kernels are for this.
bool is_for_kernels(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (!kernels::norm_kernels_built() || !x.is_cuda() || x.dim() != 4 ||
      x.numel() == 0 || !x.is_contiguous() ||
      x.scalar_type() != torch::kFloat ||
      compat::autocast_type(x) != torch::kFloat) {
    return false;
  }
  if (!weight.defined() || !bias.defined() ||
      weight.scalar_type() != torch::kFloat) {
    return false;
  }
  // Blocks of a launch, and places within a plane.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return x.size(2) * x.size(3) < kMost && x.numel() / 64 < kMost;
}

bool can_pool(const Tensor& x, AfterNorm after) {
  return after == AfterNorm::kRelu || (x.size(2) >= 2 && x.size(3) >= 2);
}

}  // namespace

Tensor relu_of_normed(Tensor normed, AfterNorm after) {
  if (after == AfterNorm::kRelu) return normed.relu_();
  if (after == AfterNorm::kReluLeanMaxPool) return lean_relu_max_pool2d(normed);
  // A maximum that is positive is the same before and after the ReLU, and has a
  // quarter of the values after it.
  return torch::max_pool2d(normed, 2).relu_();
}

Tensor batch_norm_relu(const NormState& norm, const Tensor& x,
                       AfterNorm after) {
  // LibTorch refuses one value a channel, and says so.
  if (!norm.momentum || !is_for_kernels(x, norm.weight, norm.bias) ||
      !can_pool(x, after) || x.numel() == x.size(1)) {
    return {};
  }
  NormSettings settings;
  settings.pool = after != AfterNorm::kRelu;
  settings.epsilon = norm.eps;
  if (norm.running_mean.defined()) {
    const torch::NoGradGuard no_grad;
    Tensor(norm.num_batches_tracked).add_(1);
    settings.running_mean = norm.running_mean;
    settings.running_variance = norm.running_var;
    settings.momentum = *norm.momentum;
  }
  return NormReluOperator::apply(x, norm.weight, norm.bias, settings);
}

Tensor group_norm_relu(const Tensor& weight, const Tensor& bias, int64_t groups,
                       double epsilon, const Tensor& x, AfterNorm after) {
  if (!is_for_kernels(x, weight, bias) || !can_pool(x, after)) return {};
  NormSettings settings;
  settings.groups = groups;
  settings.pool = after != AfterNorm::kRelu;
  settings.epsilon = epsilon;
  return NormReluOperator::apply(x, weight, bias, settings);
}

}  // namespace reprise
