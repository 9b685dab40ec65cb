#include "ops/cuda/norm_relu.h"

#include "ops/function.h"
#include "ops/kernels.h"

#include <reprise/ops/norm.h>
#include <reprise/ops/pool.h>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <limits>

namespace reprise::detail {
namespace {

using kernels::NormReluShape;
using kernels::NormTensors;
using ops::NormActivation;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

NormTensors norm_tensors(const Tensor& x, const Tensor& weight,
                         const Tensor& bias, const Tensor& mean,
                         const Tensor& inverse_deviation) {
  return {x.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(),
          mean.data_ptr<float>(), inverse_deviation.data_ptr<float>()};
}

struct NormReluSettings {
  int64_t groups = 0;  // 0: BatchNorm
  bool pool = false;
  double epsilon = 0;
  Tensor running_mean, running_variance;  // undefined if not tracked
  double momentum = 0;

  NormReluShape shape_of(const Tensor& x) const {
    NormReluShape shape;
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
                        const NormReluSettings& settings) {
    kernels::NormReluForward launch;
    const NormReluShape shape = launch.shape = settings.shape_of(x);
    const auto options = x.options();
    const Tensor mean = torch::empty({shape.statistics()}, options);
    const Tensor inverse = torch::empty_like(mean);
    const Tensor scratch = torch::empty({shape.scratch_size()}, options);
    Tensor y, positions;
    if (settings.pool) {
      y = torch::empty({shape.samples, shape.channels, shape.pooled_height(),
                        shape.pooled_width()},
                       options);
      positions = torch::empty(y.sizes(), options.dtype(torch::kUInt8));
    } else {
      y = torch::empty_like(x);
    }
    if (settings.running_mean.defined()) {
      launch.running = {settings.running_mean.data_ptr<float>(),
                        settings.running_variance.data_ptr<float>(),
                        settings.momentum};
    }
    launch.tensors = norm_tensors(x, weight, bias, mean, inverse);
    launch.epsilon = settings.epsilon;
    launch.scratch = scratch.data_ptr<float>();
    launch.y = y.data_ptr<float>();
    if (settings.pool) launch.positions = positions.data_ptr<uint8_t>();
    kernels::norm_relu_forward(launch, kernel_stream(x));
    variable_list saved = {x, weight, bias, mean, inverse};
    if (settings.pool) saved.push_back(positions);
    context->save_for_backward(saved);
    context->saved_data["groups"] = settings.groups;
    return y;
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    check_first_order("norm_relu");
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &bias = saved[2];
    NormReluSettings settings;
    settings.groups = context->saved_data["groups"].toInt();
    settings.pool = saved.size() > 5;
    kernels::NormReluBackward launch;
    const NormReluShape shape = launch.shape = settings.shape_of(x);
    const Tensor dy = gradients[0].contiguous();
    const Tensor scratch = torch::empty({shape.scratch_size()}, x.options());
    const Tensor sums = torch::empty({2 * shape.statistics()}, x.options());
    const Tensor dx =
        context->needs_input_grad(0) ? torch::empty_like(x) : Tensor();
    const Tensor dweight = torch::empty_like(weight);
    const Tensor dbias = torch::empty_like(bias);
    launch.tensors = norm_tensors(x, weight, bias, saved[3], saved[4]);
    launch.dy = dy.data_ptr<float>();
    if (settings.pool) launch.positions = saved[5].data_ptr<uint8_t>();
    launch.scratch = scratch.data_ptr<float>();
    launch.sums = sums.data_ptr<float>();
    if (dx.defined()) launch.dx = dx.data_ptr<float>();
    launch.dweight = dweight.data_ptr<float>();
    launch.dbias = dbias.data_ptr<float>();
    kernels::norm_relu_backward(launch, kernel_stream(x));
    return {dx, dweight, dbias, {}};
  }
};

bool norm_relu_eligible(const Tensor& x, const Tensor& weight,
                        const Tensor& bias, NormActivation activation) {
  KernelOperand images;
  images.min_dim = images.max_dim = 4;
  images.ignores_autocast = true;
  if (!kernel_eligible(x, images) || !is_float32(weight) || !bias.defined()) {
    return false;
  }
  if (activation != NormActivation::kRelu && (x.size(2) < 2 || x.size(3) < 2)) {
    return false;
  }
  // Indices within a plane and the number of blocks of a launch are 32-bit integers.
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  return x.size(2) * x.size(3) < kMax && x.numel() / 64 < kMax;
}

}  // namespace

Tensor activate_normalized(Tensor normalized, NormActivation activation) {
  if (activation == NormActivation::kRelu) return normalized.relu_();
  if (activation == NormActivation::kReluCompactMaxPool) {
    return ops::relu_max_pool2d(normalized);
  }
  // The ReLU commutes with the maximum, and after the pool it has a quarter of the values.
  return torch::max_pool2d(normalized, 2).relu_();
}

Tensor batch_norm_relu(const BatchNormState& norm, const Tensor& x,
                       NormActivation activation) {
  // LibTorch rejects one value per channel with an error.
  if (!norm.momentum ||
      !norm_relu_eligible(x, norm.weight, norm.bias, activation) ||
      x.numel() == x.size(1)) {
    return {};
  }
  NormReluSettings settings;
  settings.pool = activation != NormActivation::kRelu;
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

Tensor group_norm_relu(const torch::nn::GroupNormImpl& norm, const Tensor& x,
                       NormActivation activation) {
  if (!norm_relu_eligible(x, norm.weight, norm.bias, activation)) return {};
  NormReluSettings settings;
  settings.groups = norm.options.num_groups();
  settings.pool = activation != NormActivation::kRelu;
  settings.epsilon = norm.options.eps();
  return NormReluOperator::apply(x, norm.weight, norm.bias, settings);
}

}  // namespace reprise::detail
