#include "ops/function.h"

#include <reprise/ops/linear.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

namespace reprise::ops {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Whether LibTorch may lack silu for this tensor: on the CPU old versions have no float16.
bool needs_float(const Tensor& x) {
  return x.is_cpu() && x.scalar_type() == torch::kHalf;
}

Tensor silu_of(const Tensor& x) {
  if (!needs_float(x)) return torch::silu(x);
  return torch::silu(x.to(torch::kFloat)).to(x.scalar_type());
}

Tensor silu_gradient(const Tensor& dy, const Tensor& x) {
  if (!needs_float(x)) return at::silu_backward(dy, x);
  return at::silu_backward(dy.to(torch::kFloat), x.to(torch::kFloat))
      .to(x.scalar_type());
}

class SwigluOperator : public torch::autograd::Function<SwigluOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& gate,
                        const Tensor& up) {
    context->save_for_backward({gate, up});
    return silu_of(gate).mul_(up);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("swiglu", "ops::fallback::swiglu");
    const auto saved = context->get_saved_variables();
    const Tensor &gate = saved[0], &up = saved[1], &dy = gradients[0];
    Tensor dgate, dup;
    if (context->needs_input_grad(0)) dgate = silu_gradient(dy * up, gate);
    if (context->needs_input_grad(1)) dup = silu_of(gate).mul_(dy);
    return {dgate, dup};
  }
};

void check_swiglu(const Tensor& gate, const Tensor& up) {
  TORCH_CHECK(
      gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
      "[swiglu] expected gate and up of one shape and type, got ", gate.sizes(),
      " of ", gate.scalar_type(), " and ", up.sizes(), " of ",
      up.scalar_type());
}

}  // namespace

Tensor fallback::swiglu(const Tensor& gate, const Tensor& up) {
  check_swiglu(gate, up);
  return silu_of(gate) * up;
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  check_swiglu(gate, up);
  return SwigluOperator::apply(gate, up);
}

}  // namespace reprise::ops
