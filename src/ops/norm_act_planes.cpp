// Tested by tests/ops/norm_act_test.cpp.
#include "ops/cuda/norm_relu.h"
#include "ops/function.h"
#include "ops/kernels.h"
#include "ops/norm_act.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <limits>

namespace reprise::detail {
namespace {

using kernels::NormReluShape;
using kernels::NormTensors;
using ops::MaxPoolOptions;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

NormTensors norm_tensors(const Tensor& x, const Tensor& weight,
                         const Tensor& bias, const Tensor& mean,
                         const Tensor& inverse_deviation) {
  return {x.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(),
          mean.data_ptr<float>(), inverse_deviation.data_ptr<float>()};
}

NormReluShape planes_shape(const Tensor& x, int64_t groups, bool pool) {
  NormReluShape shape;
  shape.samples = x.size(0);
  shape.channels = x.size(1);
  shape.height = x.size(2);
  shape.width = x.size(3);
  shape.groups = groups;
  shape.pool = pool;
  return shape;
}

class PlanesOperator : public torch::autograd::Function<PlanesOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& weight, const Tensor& bias,
                        const NormSettings& settings, bool pool) {
    kernels::NormReluForward launch;
    const NormReluShape shape = launch.shape =
        planes_shape(x, settings.groups, pool);
    const auto options = x.options();
    const Tensor mean = torch::empty({shape.statistics()}, options);
    const Tensor inverse = torch::empty_like(mean);
    const Tensor scratch = torch::empty({shape.scratch_size()}, options);
    Tensor y, positions;
    if (pool) {
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
    if (pool) launch.positions = positions.data_ptr<uint8_t>();
    kernels::norm_relu_forward(launch, kernel_stream(x));
    variable_list saved = {x, weight, bias, mean, inverse};
    if (pool) saved.push_back(positions);
    context->save_for_backward(saved);
    context->saved_data["groups"] = settings.groups;
    return y;
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    check_first_order("norm_act");
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &bias = saved[2];
    const bool pool = saved.size() > 5;
    kernels::NormReluBackward launch;
    const NormReluShape shape = launch.shape =
        planes_shape(x, context->saved_data["groups"].toInt(), pool);
    const Tensor dy = gradients[0].contiguous();
    const Tensor scratch = torch::empty({shape.scratch_size()}, x.options());
    const Tensor sums = torch::empty({2 * shape.statistics()}, x.options());
    const Tensor dx =
        context->needs_input_grad(0) ? torch::empty_like(x) : Tensor();
    const Tensor dweight = torch::empty_like(weight);
    const Tensor dbias = torch::empty_like(bias);
    launch.tensors = norm_tensors(x, weight, bias, saved[3], saved[4]);
    launch.dy = dy.data_ptr<float>();
    if (pool) launch.positions = saved[5].data_ptr<uint8_t>();
    launch.scratch = scratch.data_ptr<float>();
    launch.sums = sums.data_ptr<float>();
    if (dx.defined()) launch.dx = dx.data_ptr<float>();
    launch.dweight = dweight.data_ptr<float>();
    launch.dbias = dbias.data_ptr<float>();
    kernels::norm_relu_backward(launch, kernel_stream(x));
    return {dx, dweight, dbias, {}, {}};
  }
};

/// A 2 × 2 pool.
bool is_plain_pool(const MaxPoolOptions& pool) {
  return pool.kernel == 2 && pool.step() == 2 && pool.padding == 0;
}

}  // namespace

bool norm_planes_eligible(const Tensor& x, const Tensor& weight,
                          const Tensor& bias,
                          const ops::NormActOptions& options) {
  KernelOperand images;
  images.min_dim = images.max_dim = 4;
  images.ignores_autocast = true;
  if (!kernel_eligible(x, images) || !is_float32(weight) || !is_float32(bias) ||
      options.residual.defined() ||
      options.activation != ops::NormActivation::kRelu) {
    return false;
  }
  if (options.pool &&
      (!is_plain_pool(*options.pool) || x.size(2) < 2 || x.size(3) < 2)) {
    return false;
  }
  // Indices within a plane and the number of blocks of a launch are 32-bit integers.
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  return x.size(2) * x.size(3) < kMax && x.numel() / 64 < kMax;
}

Tensor norm_act_planes(const Tensor& x, const Tensor& weight,
                       const Tensor& bias, const NormSettings& settings,
                       const ops::NormActOptions& options) {
  return PlanesOperator::apply(x, weight, bias, settings,
                               options.pool.has_value());
}

}  // namespace reprise::detail
