#include "ops/cuda/add_norm.h"

#include "compat/autocast.h"
#include "ops/function.h"
#include "ops/kernels.h"

#include <reprise/ops/norm.h>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

namespace reprise::ops {
namespace {

namespace kernels = reprise::detail::kernels;
using kernels::AddNormShape;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

AddNormShape add_norm_shape(const Tensor& x, const Tensor& branch,
                            const Tensor& normalized) {
  AddNormShape shape;
  shape.columns = x.size(-1);
  shape.rows = x.numel() / shape.columns;
  shape.branch = detail::kernel_dtype(branch);
  shape.normalized = detail::kernel_dtype(normalized);
  return shape;
}

class AddNormOperator : public torch::autograd::Function<AddNormOperator> {
 public:
  /// `branch`: empty if there is none. `type`: of the normalized rows.
  static variable_list forward(AutogradContext* context, const Tensor& x,
                               const Tensor& branch, const Tensor& weight,
                               const Tensor& bias, double epsilon,
                               torch::ScalarType type) {
    const bool adds = branch.numel() > 0;
    const Tensor sum = adds ? torch::empty_like(x) : x;
    const Tensor normalized = torch::empty_like(x, x.options().dtype(type));
    kernels::AddNormForward launch;
    launch.shape = add_norm_shape(x, adds ? branch : Tensor(), normalized);
    const Tensor mean = torch::empty({launch.shape.rows}, x.options());
    const Tensor inverse = torch::empty_like(mean);
    launch.x = x.data_ptr<float>();
    launch.branch = adds ? branch.data_ptr() : nullptr;
    launch.weight = weight.data_ptr<float>();
    launch.bias = bias.data_ptr<float>();
    launch.epsilon = epsilon;
    launch.sum = adds ? sum.data_ptr<float>() : nullptr;
    launch.normalized = normalized.data_ptr();
    launch.mean = mean.data_ptr<float>();
    launch.inverse_deviation = inverse.data_ptr<float>();
    kernels::add_norm_forward(launch, detail::kernel_stream(x));
    context->save_for_backward({sum, weight, mean, inverse});
    context->set_materialize_grads(false);
    context->saved_data["adds"] = adds;
    context->saved_data["branch"] = static_cast<int64_t>(branch.scalar_type());
    return {sum, normalized};
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("add_norm");
    const bool adds = context->saved_data["adds"].toBool();
    const auto type =
        static_cast<torch::ScalarType>(context->saved_data["branch"].toInt());
    const Tensor dsum =
        gradients[0].defined() ? gradients[0].contiguous() : Tensor();
    if (!gradients[1].defined()) {
      return {dsum, adds && dsum.defined() ? dsum.to(type) : Tensor(),
              {},   {},
              {},   {}};
    }
    const auto saved = context->get_saved_variables();
    const Tensor &sum = saved[0], &weight = saved[1];
    const Tensor dnormalized = gradients[1].contiguous();
    const Tensor dx = torch::empty_like(sum);
    Tensor dbranch;
    if (adds) {
      dbranch = type == torch::kFloat
                    ? dx
                    : torch::empty_like(sum, sum.options().dtype(type));
    }
    kernels::AddNormBackward launch;
    launch.shape = add_norm_shape(sum, dbranch, dnormalized);
    const Tensor scratch =
        torch::empty({launch.shape.scratch_size()}, sum.options());
    const Tensor dweight = torch::empty_like(weight);
    const Tensor dbias = torch::empty_like(weight);
    launch.sum = sum.data_ptr<float>();
    launch.dnormalized = dnormalized.data_ptr();
    launch.dsum = dsum.defined() ? dsum.data_ptr<float>() : nullptr;
    launch.weight = weight.data_ptr<float>();
    launch.mean = saved[2].data_ptr<float>();
    launch.inverse_deviation = saved[3].data_ptr<float>();
    launch.scratch = scratch.data_ptr<float>();
    launch.dx = dx.data_ptr<float>();
    launch.dbranch = adds ? dbranch.data_ptr() : nullptr;
    launch.dweight = dweight.data_ptr<float>();
    launch.dbias = dbias.data_ptr<float>();
    kernels::add_norm_backward(launch, detail::kernel_stream(sum));
    return {dx, dbranch, dweight, dbias, {}, {}};
  }
};

bool add_norm_eligible(const Tensor& x, const Tensor& branch,
                       const torch::nn::LayerNorm& norm) {
  detail::KernelOperand rows;
  rows.min_dim = 2;
  if (!detail::kernel_eligible(x, rows)) return false;
  const int64_t columns = x.size(-1);
  const auto& shape = norm->options.normalized_shape();
  if (shape.size() != 1 || shape[0] != columns || columns % 4 != 0 ||
      columns > AddNormShape::kMaxColumns ||
      !detail::is_float32(norm->weight) || !detail::is_float32(norm->bias)) {
    return false;
  }
  if (!branch.defined()) return true;
  return branch.is_contiguous() && branch.sizes() == x.sizes() &&
         (detail::is_float32(branch) || detail::is_half(branch));
}

}  // namespace

AddNormResult fallback::add_norm(const Tensor& x, const Tensor& branch,
                                 torch::nn::LayerNorm norm) {
  const Tensor sum = branch.defined() ? x + branch : x;
  return {sum, norm->forward(sum)};
}

AddNormResult add_norm(const Tensor& x, const Tensor& branch,
                       torch::nn::LayerNorm norm) {
  if (!add_norm_eligible(x, branch, norm)) {
    return fallback::add_norm(x, branch, norm);
  }
  const auto results = AddNormOperator::apply(
      x, detail::defined_or_empty(branch, x), norm->weight, norm->bias,
      norm->options.eps(), compat::autocast_type(x));
  return {results[0], results[1]};
}

}  // namespace reprise::ops
