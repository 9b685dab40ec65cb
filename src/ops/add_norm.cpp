#include "ops/add_norm.h"

#include "compat/autocast.h"
#include "ops/cuda/device.h"
#include "ops/function.h"
#include "ops/kernels.h"

#include <torch/csrc/autograd/custom_function.h>

namespace reprise::detail {
namespace {

using kernels::AddNormShape;
using kernels::NormKind;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

AddNormShape add_norm_shape(const Tensor& x, const Tensor& branch,
                            const Tensor& normalized, const Tensor& weight,
                            NormKind kind) {
  AddNormShape shape;
  shape.kind = kind;
  shape.columns = x.size(-1);
  shape.rows = x.numel() / shape.columns;
  shape.multiprocessors = kernels::multiprocessors(x.device().index());
  shape.x = kernel_dtype(x);
  shape.branch = kernel_dtype(branch);
  shape.normalized = kernel_dtype(normalized);
  shape.weight = kernel_dtype(weight);
  return shape;
}

class AddNormOperator : public torch::autograd::Function<AddNormOperator> {
 public:
  /// `branch`: empty if there is none. `bias`: empty for the RMS norm. `type`: of the
  /// normalized rows. `post`: return the normalized rows in the type of x, too, instead of
  /// the sum.
  static variable_list forward(AutogradContext* context, const Tensor& x,
                               const Tensor& branch, const Tensor& weight,
                               const Tensor& bias, double epsilon,
                               torch::ScalarType type, bool post) {
    const bool adds = branch.numel() > 0;
    const bool layer = bias.numel() > 0;
    const Tensor sum = adds ? torch::empty_like(x) : x;
    const Tensor normalized = torch::empty_like(x, x.options().dtype(type));
    kernels::AddNormForward launch;
    launch.shape =
        add_norm_shape(x, undefined_if_empty(branch), normalized, weight,
                       layer ? NormKind::kLayer : NormKind::kRms);
    const auto floats = x.options().dtype(torch::kFloat);
    const Tensor inverse = torch::empty({launch.shape.rows}, floats);
    const Tensor mean =
        layer ? torch::empty({launch.shape.rows}, floats) : Tensor();
    launch.x = x.data_ptr();
    launch.branch = adds ? branch.data_ptr() : nullptr;
    launch.weight = weight.data_ptr();
    launch.bias = layer ? bias.data_ptr() : nullptr;
    launch.epsilon = epsilon;
    launch.sum = adds ? sum.data_ptr() : nullptr;
    launch.normalized = normalized.data_ptr();
    const Tensor stream = post ? torch::empty_like(x) : Tensor();
    launch.stream = post ? stream.data_ptr() : nullptr;
    launch.mean = float_data(mean);
    launch.inverse = float_data(inverse);
    kernels::add_norm_forward(launch, kernel_stream(x));
    context->save_for_backward({sum, inverse, mean});
    // Not as a saved variable: it is no activation.
    context->saved_data["weight"] = weight;
    context->set_materialize_grads(false);
    context->saved_data["layer"] = layer;
    context->saved_data["adds"] = adds;
    context->saved_data["post"] = post;
    context->saved_data["branch"] = static_cast<int64_t>(branch.scalar_type());
    return {post ? stream : sum, normalized};
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    context->saved_data["layer"].toBool()
        ? check_first_order("add_norm")
        : check_first_order("rms_norm", "ops::fallback::rms_norm");
    const bool adds = context->saved_data["adds"].toBool();
    const auto type =
        static_cast<torch::ScalarType>(context->saved_data["branch"].toInt());
    const Tensor dsum =
        gradients[0].defined() ? as_aligned(gradients[0], 4) : Tensor();
    const bool post = context->saved_data["post"].toBool();
    if (!gradients[1].defined() && !post) {
      return {dsum, adds && dsum.defined() ? dsum.to(type) : Tensor(),
              {},   {},
              {},   {},
              {}};
    }
    const auto saved = context->get_saved_variables();
    const Tensor &sum = saved[0], &inverse = saved[1], &mean = saved[2];
    const Tensor weight = context->saved_data["weight"].toTensor();
    const Tensor dnormalized = gradients[1].defined()
                                   ? as_aligned(gradients[1], 4)
                                   : torch::zeros_like(sum);
    const Tensor dx = torch::empty_like(sum);
    const bool converts = adds && type != sum.scalar_type();
    const Tensor dbranch =
        converts ? torch::empty_like(sum, sum.options().dtype(type)) : Tensor();
    const bool layer = context->saved_data["layer"].toBool();
    kernels::AddNormBackward launch;
    launch.shape = add_norm_shape(sum, dbranch, dnormalized, weight,
                                  layer ? NormKind::kLayer : NormKind::kRms);
    Tensor dweight, dbias, scratch;
    if (context->needs_input_grad(2) || context->needs_input_grad(3)) {
      scratch = torch::empty({launch.shape.scratch_size()}, inverse.options());
      dweight = torch::empty_like(weight);
      if (layer) dbias = torch::empty_like(weight);
    }
    launch.sum = sum.data_ptr();
    launch.dnormalized = dnormalized.data_ptr();
    launch.dsum = dsum.defined() ? dsum.data_ptr() : nullptr;
    launch.of_stream = post && dsum.defined();
    launch.weight = weight.data_ptr();
    launch.mean = float_data(mean);
    launch.inverse = float_data(inverse);
    launch.scratch = float_data(scratch);
    launch.dx = dx.data_ptr();
    launch.dbranch = converts ? dbranch.data_ptr() : nullptr;
    launch.dweight = dweight.defined() ? dweight.data_ptr() : nullptr;
    launch.dbias = dbias.defined() ? dbias.data_ptr() : nullptr;
    kernels::add_norm_backward(launch, kernel_stream(sum));
    // The gradient of a branch of the same type is dx.
    const Tensor of_branch = converts ? dbranch : adds ? dx : Tensor();
    return {dx, of_branch, dweight, dbias, {}, {}, {}};
  }
};

/// Whether the kernels can read a vector of weights.
bool is_kernel_weight(const Tensor& weight, int64_t columns) {
  return (is_float32(weight) || is_half(weight)) && weight.dim() == 1 &&
         weight.size(0) == columns && weight.is_contiguous() &&
         is_aligned(weight, 4);
}

bool add_norm_eligible(const Tensor& x, const Tensor& branch,
                       const RowNorm& norm) {
  KernelOperand rows;
  if (is_half(x)) rows.type = KernelOperand::Type::kHalf;
  if (!kernel_eligible(x, rows) || !is_aligned(x, 4)) return false;
  const int64_t columns = x.size(-1);
  if (columns % 4 != 0 || columns > AddNormShape::kMaxColumns ||
      !is_kernel_weight(norm.weight, columns)) {
    return false;
  }
  if (norm.kind == NormKind::kLayer &&
      (!is_kernel_weight(norm.bias, columns) ||
       norm.bias.scalar_type() != norm.weight.scalar_type())) {
    return false;
  }
  if (!branch.defined()) return true;
  return branch.is_contiguous() && branch.sizes() == x.sizes() &&
         branch.device() == x.device() && is_aligned(branch, 4) &&
         (branch.scalar_type() == x.scalar_type() ||
          (is_float32(x) && is_half(branch)));
}

}  // namespace

std::optional<ops::AddNormResult> run_add_norm(const Tensor& x,
                                               const Tensor& branch,
                                               const RowNorm& norm,
                                               torch::ScalarType type,
                                               bool post) {
  if (!add_norm_eligible(x, branch, norm)) return std::nullopt;
  const auto results = AddNormOperator::apply(
      x, defined_or_empty(branch, x), norm.weight,
      defined_or_empty(norm.bias, x), norm.epsilon, type, post);
  return ops::AddNormResult{results[0], results[1]};
}

}  // namespace reprise::detail

namespace reprise::ops {

using torch::Tensor;

AddNormResult fallback::add_norm(const Tensor& x, const Tensor& branch,
                                 torch::nn::LayerNorm norm) {
  const Tensor sum = branch.defined() ? x + branch : x;
  return {sum, norm->forward(sum)};
}

namespace {

/// The norm for the kernels; nullopt if they do not support it.
std::optional<detail::RowNorm> row_norm(const torch::nn::LayerNorm& norm) {
  if (norm->options.normalized_shape().size() != 1 || !norm->bias.defined()) {
    return std::nullopt;
  }
  return detail::RowNorm{detail::kernels::NormKind::kLayer, norm->weight,
                         norm->bias, norm->options.eps()};
}

}  // namespace

AddNormResult add_norm(const Tensor& x, const Tensor& branch,
                       torch::nn::LayerNorm norm) {
  if (const auto row = row_norm(norm)) {
    const auto made =
        detail::run_add_norm(x, branch, *row, compat::autocast_type(x));
    if (made) return *made;
  }
  return fallback::add_norm(x, branch, norm);
}

PostNormResult fallback::post_norm(const Tensor& x, const Tensor& branch,
                                   torch::nn::LayerNorm norm) {
  const Tensor stream = add_norm(x, branch, norm).normalized;
  return {stream, stream};
}

PostNormResult post_norm(const Tensor& x, const Tensor& branch,
                         torch::nn::LayerNorm norm, bool round) {
  if (const auto row = row_norm(norm)) {
    const auto type = round ? compat::autocast_type(x) : x.scalar_type();
    const bool both = type != x.scalar_type();
    const auto made = detail::run_add_norm(x, branch, *row, type, both);
    if (made && both) return {made->sum, made->normalized};
    if (made) return {made->normalized, made->normalized};
  }
  return fallback::post_norm(x, branch, norm);
}

}  // namespace reprise::ops
