#include "compat/autocast.h"
#include "ops/add_norm.h"
#include "ops/function.h"
#include "ops/kernels.h"

#include <reprise/ops/norm.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

namespace reprise::ops {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Half-precision tensors as float32, others as they are.
Tensor as_wide(const Tensor& x) {
  return detail::is_half(x) ? x.to(torch::kFloat) : x;
}

/// 1 / √(mean(x²) + eps) of each row, (…, 1).
Tensor inverse_norm(const Tensor& wide, double eps) {
  return wide.square().mean(-1, /*keepdim=*/true).add_(eps).rsqrt_();
}

class RmsNormOperator : public torch::autograd::Function<RmsNormOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& weight, double eps) {
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    const Tensor wide = as_wide(x);
    const Tensor inverse = inverse_norm(wide, eps);
    context->save_for_backward({x, inverse});
    // Not as a saved variable: it is no activation.
    context->saved_data["weight"] = weight;
    return (wide * inverse).to(x.scalar_type()).mul(weight);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("rms_norm", "ops::fallback::rms_norm");
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &inverse = saved[1];
    const Tensor weight = context->saved_data["weight"].toTensor();
    const Tensor dy = as_wide(gradients[0]);
    const Tensor normalized = as_wide(x) * inverse;
    Tensor dx, dweight;
    if (context->needs_input_grad(1)) {
      // The forward multiplied the rounded values.
      dweight = (dy * normalized.to(x.scalar_type()))
                    .reshape({-1, x.size(-1)})
                    .sum(0)
                    .to(weight.scalar_type());
    }
    if (context->needs_input_grad(0)) {
      // dx = (g - n · mean(g n)) / norm with g = dy · weight and n = normalized.
      Tensor g = dy * as_wide(weight.detach());
      const Tensor mean = (g * normalized).mean(-1, /*keepdim=*/true);
      dx = g.sub_(normalized * mean).mul_(inverse).to(x.scalar_type());
    }
    return {dx, dweight, {}};
  }
};

/// Type of the normalized rows: what autocast selects, otherwise as rms_norm() returns.
torch::ScalarType normalized_type(const Tensor& x, const Tensor& weight) {
  const auto selected = compat::autocast_type(weight);
  if (selected != weight.scalar_type()) return selected;
  return c10::promoteTypes(x.scalar_type(), weight.scalar_type());
}

void check_rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  TORCH_CHECK(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(-1),
              "[rms_norm] expected x (…, D) and weight (D), got ", x.sizes(),
              " and ", weight.sizes());
  TORCH_CHECK(eps >= 0, "[rms_norm] expected eps of at least 0, got ", eps);
}

}  // namespace

Tensor fallback::rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_rms_norm(x, weight, eps);
  const compat::AutocastGuard no_autocast(compat::AutocastState{});
  const Tensor wide = as_wide(x);
  const Tensor inverse = (wide * wide).mean(-1, true).add(eps).rsqrt();
  return (wide * inverse).to(x.scalar_type()) * weight;
}

AddNormResult fallback::add_rms_norm(const Tensor& x, const Tensor& branch,
                                     const Tensor& weight, double eps) {
  const Tensor sum = branch.defined() ? x + branch : x;
  return {sum, rms_norm(sum, weight, eps)};
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_rms_norm(x, weight, eps);
  const auto made = detail::run_add_norm(
      x, {}, {detail::kernels::NormKind::kRms, weight, {}, eps},
      c10::promoteTypes(x.scalar_type(), weight.scalar_type()));
  return made ? made->normalized : RmsNormOperator::apply(x, weight, eps);
}

AddNormResult add_rms_norm(const Tensor& x, const Tensor& branch,
                           const Tensor& weight, double eps) {
  check_rms_norm(x, weight, eps);
  const auto made = detail::run_add_norm(
      x, branch, {detail::kernels::NormKind::kRms, weight, {}, eps},
      normalized_type(x, weight));
  if (made) return *made;
  const Tensor sum = branch.defined() ? x + branch : x;
  return {sum, rms_norm(sum, weight, eps)};
}

}  // namespace reprise::ops
