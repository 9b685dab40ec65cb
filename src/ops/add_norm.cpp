#include "ops/cuda/add_norm.h"

#include "compat/autocast.h"
#include "compat/cuda.h"

#include <reprise/ops/add_norm.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

namespace reprise {
namespace {

using kernels::RowsShape;
using kernels::Values;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Values values_of(const Tensor& tensor) {
  if (!tensor.defined()) return Values::kNone;
  switch (tensor.scalar_type()) {
    case torch::kBFloat16:
      return Values::kBfloat16;
    case torch::kHalf:
      return Values::kHalf;
    default:
      return Values::kSingle;
  }
}

void* rows_stream(const Tensor& x) {
  return compat::current_cuda_stream(x.device().index());
}

RowsShape rows_of(const Tensor& x, const Tensor& result) {
  RowsShape shape;
  shape.columns = x.size(-1);
  shape.rows = x.numel() / shape.columns;
  shape.result = values_of(result);
  return shape;
}

class AddNormOperator : public torch::autograd::Function<AddNormOperator> {
 public:
  /// `branch` is empty for none: the operator's arguments are all defined.
  static variable_list forward(AutogradContext* context, const Tensor& x,
                               const Tensor& branch, const Tensor& weight,
                               const Tensor& bias, double epsilon,
                               torch::ScalarType type) {
    const bool adds = branch.numel() > 0;
    const Tensor sum = adds ? torch::empty_like(x) : x;
    const Tensor normal = torch::empty_like(x, x.options().dtype(type));
    RowsShape shape = rows_of(x, normal);
    if (adds) shape.branch = values_of(branch);
    const Tensor mean = torch::empty({shape.rows}, x.options());
    const Tensor inverse = torch::empty_like(mean);
    kernels::add_norm_forward(
        shape, x.data_ptr<float>(), adds ? branch.data_ptr() : nullptr,
        weight.data_ptr<float>(), bias.data_ptr<float>(), epsilon,
        adds ? sum.data_ptr<float>() : nullptr, normal.data_ptr(),
        mean.data_ptr<float>(), inverse.data_ptr<float>(), rows_stream(x));
    context->save_for_backward({sum, weight, mean, inverse});
    context->set_materialize_grads(false);
    context->saved_data["adds"] = adds;
    context->saved_data["branch"] = static_cast<int64_t>(branch.scalar_type());
    return {sum, normal};
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    TORCH_CHECK(!torch::GradMode::is_enabled(),
                "[lean_add_norm] has no second derivative");
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
    const Tensor dnormal = gradients[1].contiguous();
    RowsShape shape = rows_of(sum, dnormal);
    const Tensor dx = torch::empty_like(sum);
    Tensor dbranch;
    if (adds) {
      dbranch = type == torch::kFloat
                    ? dx
                    : torch::empty_like(sum, sum.options().dtype(type));
      shape.branch = values_of(dbranch);
    }
    const Tensor scratch = torch::empty({shape.scratch()}, sum.options());
    const Tensor dweight = torch::empty_like(weight);
    const Tensor dbias = torch::empty_like(weight);
    kernels::add_norm_backward(
        shape, sum.data_ptr<float>(), dnormal.data_ptr(),
        dsum.defined() ? dsum.data_ptr<float>() : nullptr,
        weight.data_ptr<float>(), saved[2].data_ptr<float>(),
        saved[3].data_ptr<float>(), scratch.data_ptr<float>(),
        dx.data_ptr<float>(), adds ? dbranch.data_ptr() : nullptr,
        dweight.data_ptr<float>(), dbias.data_ptr<float>(), rows_stream(sum));
    return {dx, dbranch, dweight, dbias, {}, {}};
  }
};

bool is_single(const Tensor& tensor) {
  return tensor.defined() && tensor.scalar_type() == torch::kFloat;
}

bool are_for_kernels(const Tensor& x, const Tensor& branch,
                     const torch::nn::LayerNorm& norm) {
  if (!kernels::add_norm_kernels_built() || !x.is_cuda() || !is_single(x) ||
      x.dim() < 2 || x.numel() == 0 || !x.is_contiguous()) {
    return false;
  }
  const int64_t columns = x.size(-1);
  const auto& shape = norm->options.normalized_shape();
  if (shape.size() != 1 || shape[0] != columns || columns % 4 != 0 ||
      columns > RowsShape::kMostColumns || !is_single(norm->weight) ||
      !is_single(norm->bias)) {
    return false;
  }
  if (!branch.defined()) return true;
  return branch.is_contiguous() && branch.sizes() == x.sizes() &&
         (is_single(branch) || branch.element_size() == 2) &&
         branch.is_floating_point();
}

}  // namespace

AddedNorm lean_add_norm(const Tensor& x, const Tensor& branch,
                        torch::nn::LayerNorm norm) {
  if (!are_for_kernels(x, branch, norm)) {
    const Tensor sum = branch.defined() ? x + branch : x;
    return {sum, norm->forward(sum)};
  }
  const Tensor some = branch.defined() ? branch : x.detach().new_empty({0});
  const auto results =
      AddNormOperator::apply(x, some, norm->weight, norm->bias,
                             norm->options.eps(), compat::autocast_type(x));
  return {results[0], results[1]};
}

}  // namespace reprise
