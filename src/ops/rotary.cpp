#include "compat/autocast.h"
#include "ops/function.h"
#include "ops/rotate_heads.h"

#include <reprise/ops/attention.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

namespace reprise::ops {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Rotates by the angles, or by the negative ones if `direction` is -1.
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin,
              int direction) {
  const Tensor turned = detail::run_rotate(x, cos, sin, direction < 0);
  if (turned.defined()) return turned;
  const compat::AutocastGuard no_autocast(compat::AutocastState{});
  const int64_t half = x.size(-1) / 2;
  const auto type = c10::promoteTypes(x.scalar_type(), cos.scalar_type());
  const Tensor wide = x.to(type);
  const Tensor c = cos.to(type), s = sin.to(type);
  const Tensor a = wide.narrow(-1, 0, half), b = wide.narrow(-1, half, half);
  const Tensor result = torch::empty_like(wide);
  Tensor first = result.narrow(-1, 0, half);
  Tensor second = result.narrow(-1, half, half);
  torch::mul_out(first, a, c).addcmul_(b, s, -direction);
  torch::mul_out(second, b, c).addcmul_(a, s, direction);
  return result.to(x.scalar_type());
}

/// Whether the angles are the same for all samples and heads.
bool is_table(const Tensor& cos) {
  return cos.dim() == 2;
}

class RotaryOperator : public torch::autograd::Function<RotaryOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& cos, const Tensor& sin) {
    if (is_table(cos)) {
      // Not as saved variables, which would be counted, and moved to the host, per layer.
      context->saved_data["cos"] = cos;
      context->saved_data["sin"] = sin;
    } else {
      context->save_for_backward({cos, sin});
    }
    return rotate(x, cos, sin, 1);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("rotary", "ops::fallback::rotary");
    auto& data = context->saved_data;
    if (data.count("cos") > 0) {
      return {rotate(gradients[0], data["cos"].toTensor(),
                     data["sin"].toTensor(), -1),
              {},
              {}};
    }
    const auto saved = context->get_saved_variables();
    return {rotate(gradients[0], saved[0], saved[1], -1), {}, {}};
  }
};

void check_rotary(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  TORCH_CHECK(x.dim() >= 2 && x.size(-1) % 2 == 0,
              "[rotary] expected x (…, T, D) with an even D, got ", x.sizes());
  bool fits = cos.sizes() == sin.sizes() && cos.dim() <= x.dim();
  for (int64_t i = 1; fits && i <= cos.dim(); ++i) {
    const int64_t size = i == 1 ? x.size(-1) / 2 : x.size(-i);
    fits = cos.size(-i) == size || (i > 2 && cos.size(-i) == 1);
  }
  TORCH_CHECK(fits && cos.dim() >= 2,
              "[rotary] expected cos and sin that broadcast to half of x, "
              "(…, T, D/2), got ",
              cos.sizes(), " and ", sin.sizes(), " for x ", x.sizes());
}

}  // namespace

Tensor fallback::rotary(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check_rotary(x, cos, sin);
  const compat::AutocastGuard no_autocast(compat::AutocastState{});
  const auto halves = x.chunk(2, -1);
  const Tensor turned = torch::cat({-halves[1], halves[0]}, -1);
  return (x * torch::cat({cos, cos}, -1) + turned * torch::cat({sin, sin}, -1))
      .to(x.scalar_type());
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check_rotary(x, cos, sin);
  return RotaryOperator::apply(x, cos, sin);
}

}  // namespace reprise::ops
