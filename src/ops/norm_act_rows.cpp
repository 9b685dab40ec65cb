// Tested by tests/ops/norm_act_test.cpp.
#include "ops/channels_last.h"
#include "ops/cuda/norm_act.h"
#include "ops/cuda/norm_act_pool.h"
#include "ops/cuda/norm_statistics.h"
#include "ops/function.h"
#include "ops/kernels.h"
#include "ops/norm_act.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

using kernels::NormValues;
using kernels::PoolWindow;
using kernels::RowsShape;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

kernels::Activation kernel_activation(ops::NormActivation activation) {
  switch (activation) {
    case ops::NormActivation::kNone:
      return kernels::Activation::kNone;
    case ops::NormActivation::kRelu:
      return kernels::Activation::kRelu;
    case ops::NormActivation::kSilu:
      return kernels::Activation::kSilu;
  }
  return kernels::Activation::kNone;
}

/// Input, parameters and statistics of the norm, and what its kernels need besides.
struct RowsNorm {
  Tensor x, weight, bias, mean, inverse;
  RowsShape shape;
  kernels::Activation activation = kernels::Activation::kNone;
  PoolWindow window;

  NormValues values() const {
    return {x.data_ptr(), weight.data_ptr<float>(), bias.data_ptr<float>(),
            mean.data_ptr<float>(), inverse.data_ptr<float>()};
  }
  template <class Launch>
  void describe(Launch& launch) const {
    launch.shape = shape;
    launch.norm = values();
  }
  Tensor make_scratch() const {
    return torch::empty({shape.scratch_size()}, mean.options());
  }
};

/// Computes mean and inverse deviation, and updates the running statistics.
void compute_statistics(const RowsNorm& norm, const NormSettings& settings) {
  const Tensor scratch = norm.make_scratch();
  kernels::NormStatistics launch;
  launch.shape = norm.shape;
  launch.x = norm.x.data_ptr();
  launch.epsilon = settings.epsilon;
  launch.scratch = scratch.data_ptr<float>();
  launch.mean = norm.mean.data_ptr<float>();
  launch.inverse_deviation = norm.inverse.data_ptr<float>();
  if (settings.running_mean.defined()) {
    launch.running = {settings.running_mean.data_ptr<float>(),
                      settings.running_variance.data_ptr<float>(),
                      settings.momentum};
  }
  kernels::norm_statistics(launch, kernel_stream(norm.x));
}

/// y, and the positions of the maxima.
std::pair<Tensor, Tensor> apply_and_pool(const RowsNorm& norm) {
  const Tensor y = empty_pooled(norm.x, norm.window, norm.x.scalar_type());
  const Tensor positions = empty_pooled(norm.x, norm.window, torch::kUInt8);
  kernels::NormActPoolForward launch;
  norm.describe(launch);
  launch.activation = norm.activation;
  launch.window = norm.window;
  launch.y = y.data_ptr();
  launch.positions = positions.data_ptr<uint8_t>();
  kernels::norm_act_pool_forward(launch, kernel_stream(norm.x));
  return {y, positions};
}

Tensor apply_norm(const RowsNorm& norm, const Tensor& residual) {
  const Tensor y = torch::empty_like(norm.x);
  kernels::NormActForward launch;
  norm.describe(launch);
  launch.activation = norm.activation;
  if (residual.defined()) launch.residual = residual.data_ptr();
  launch.y = y.data_ptr();
  kernels::norm_act_forward(launch, kernel_stream(norm.x));
  return y;
}

/// Merged sums over the gradient of the norm's output.
struct RowsSums {
  Tensor coefficients, dweight, dbias;
};

RowsSums merge_sums(const RowsNorm& norm, const Tensor& scratch) {
  RowsSums sums{
      torch::empty({2 * norm.shape.statistics()}, norm.mean.options()),
      torch::empty_like(norm.weight), torch::empty_like(norm.bias)};
  kernels::NormSums launch;
  launch.shape = norm.shape;
  launch.scratch = scratch.data_ptr<float>();
  launch.weight = norm.weight.data_ptr<float>();
  launch.inverse_deviation = norm.inverse.data_ptr<float>();
  launch.coefficients = sums.coefficients.data_ptr<float>();
  launch.dweight = sums.dweight.data_ptr<float>();
  launch.dbias = sums.dbias.data_ptr<float>();
  kernels::norm_sums(launch, kernel_stream(norm.x));
  return sums;
}

struct RowsGradients {
  Tensor dx, dweight, dbias;
  Tensor g;  // of the norm's output, if the kernel wrote it
};

/// `third`: y with a ReLU, the residual with SiLU, undefined if there was no residual.
RowsGradients backward_rows(const RowsNorm& norm, const Tensor& dy,
                            const Tensor& third, bool needs_dx) {
  void* const stream = kernel_stream(norm.x);
  const Tensor scratch = norm.make_scratch();
  RowsGradients result;
  kernels::NormActSums sums;
  norm.describe(sums);
  sums.activation = norm.activation;
  sums.dy = dy.data_ptr();
  if (third.defined()) {
    (norm.activation == kernels::Activation::kRelu ? sums.y : sums.residual) =
        third.data_ptr();
    result.g = torch::empty_like(norm.x);
    sums.g = result.g.data_ptr();
  }
  sums.scratch = scratch.data_ptr<float>();
  kernels::norm_act_sums(sums, stream);
  const RowsSums merged = merge_sums(norm, scratch);
  result.dweight = merged.dweight;
  result.dbias = merged.dbias;
  if (!needs_dx) return result;
  result.dx = torch::empty_like(norm.x);
  kernels::NormActBackward launch;
  norm.describe(launch);
  if (!third.defined()) launch.activation = norm.activation;
  launch.dy = third.defined() ? result.g.data_ptr() : dy.data_ptr();
  launch.coefficients = merged.coefficients.data_ptr<float>();
  launch.dx = result.dx.data_ptr();
  kernels::norm_act_backward(launch, stream);
  return result;
}

RowsGradients backward_pooled(const RowsNorm& norm, const Tensor& dy,
                              const Tensor& positions, bool needs_dx) {
  void* const stream = kernel_stream(norm.x);
  const Tensor scratch = norm.make_scratch();
  const auto describe = [&](auto& launch) {
    norm.describe(launch);
    launch.window = norm.window;
    launch.dy = dy.data_ptr();
    launch.positions = positions.data_ptr<uint8_t>();
  };
  kernels::NormActPoolSums sums;
  describe(sums);
  sums.scratch = scratch.data_ptr<float>();
  kernels::norm_act_pool_sums(sums, stream);
  const RowsSums merged = merge_sums(norm, scratch);
  RowsGradients result{{}, merged.dweight, merged.dbias, {}};
  if (!needs_dx) return result;
  result.dx = torch::empty_like(norm.x);
  kernels::NormActPoolBackward launch;
  describe(launch);
  launch.coefficients = merged.coefficients.data_ptr<float>();
  launch.dx = result.dx.data_ptr();
  kernels::norm_act_pool_backward(launch, stream);
  return result;
}

class RowsOperator : public torch::autograd::Function<RowsOperator> {
 public:
  /// `residual`: empty if there is none.
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& weight, const Tensor& bias,
                        const Tensor& residual, const NormSettings& settings,
                        ops::NormActivation activation,
                        const std::optional<ops::MaxPoolOptions>& pool) {
    RowsNorm norm{x, weight, bias, {}, {}, {}, {}, {}};
    norm.shape = rows_shape(x, settings.groups, pool.has_value());
    norm.activation = kernel_activation(activation);
    if (pool) norm.window = pool_window(*pool);
    norm.mean = torch::empty({norm.shape.statistics()},
                             x.options().dtype(torch::kFloat));
    norm.inverse = torch::empty_like(norm.mean);
    compute_statistics(norm, settings);
    variable_list saved = {x, weight, bias, norm.mean, norm.inverse};
    Tensor y;
    if (pool) {
      Tensor positions;
      std::tie(y, positions) = apply_and_pool(norm);
      saved.push_back(positions);
    } else {
      const Tensor added = undefined_if_empty(residual);
      y = apply_norm(norm, added);
      if (added.defined() && activation != ops::NormActivation::kNone) {
        saved.push_back(activation == ops::NormActivation::kRelu ? y
                                                                 : residual);
      }
    }
    context->save_for_backward(saved);
    auto& data = context->saved_data;
    data["groups"] = settings.groups;
    data["activation"] = static_cast<int64_t>(activation);
    data["window"] = std::vector<int64_t>{pool ? norm.window.kernel : 0,
                                          norm.window.padding};
    return y;
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    check_first_order("norm_act");
    const variable_list saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const auto window = data["window"].toIntVector();
    const bool pooled = window[0] != 0;
    RowsNorm norm{saved[0], saved[1], saved[2], saved[3], saved[4], {}, {}, {}};
    norm.shape = rows_shape(norm.x, data["groups"].toInt(), pooled);
    norm.activation = kernel_activation(
        static_cast<ops::NormActivation>(data["activation"].toInt()));
    norm.window = {window[0], window[1]};
    const Tensor dy = as_rows(gradients[0], norm.x.scalar_type());
    const Tensor third = saved.size() > 5 ? saved[5] : Tensor();
    const bool needs_dx = context->needs_input_grad(0);
    const RowsGradients result =
        pooled ? backward_pooled(norm, dy, third, needs_dx)
               : backward_rows(norm, dy, third, needs_dx);
    Tensor dresidual;
    if (context->needs_input_grad(3)) {
      dresidual = result.g.defined() ? result.g : dy;
    }
    return {result.dx, result.dweight, result.dbias, dresidual, {}, {}, {}};
  }
};

}  // namespace

bool norm_rows_eligible(const Tensor& x, const Tensor& weight,
                        const Tensor& bias,
                        const ops::NormActOptions& options) {
  if (!rows_eligible(x) || !is_float32(weight) || !is_float32(bias)) {
    return false;
  }
  const Tensor& residual = options.residual;
  if (options.pool) {
    // The maximum of SiLU is not that of its argument.
    return !residual.defined() &&
           options.activation != ops::NormActivation::kSilu &&
           pool_of_rows_eligible(x, *options.pool);
  }
  return !residual.defined() || (residual.sizes() == x.sizes() &&
                                 residual.scalar_type() == x.scalar_type() &&
                                 residual.device() == x.device());
}

Tensor norm_act_rows(const Tensor& x, const Tensor& weight, const Tensor& bias,
                     const NormSettings& settings,
                     const ops::NormActOptions& options) {
  const Tensor residual = options.residual.defined()
                              ? as_rows(options.residual, x.scalar_type())
                              : Tensor();
  return RowsOperator::apply(as_rows(x, x.scalar_type()), weight, bias,
                             defined_or_empty(residual, x), settings,
                             options.activation, options.pool);
}

}  // namespace reprise::detail
