#include "ops/function.h"

#include <reprise/ops/dropout.h>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

namespace reprise::ops {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class DropoutOperator : public torch::autograd::Function<DropoutOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x, double p) {
    // Draws and scales as LibTorch does.
    Tensor factors = torch::empty_like(x).bernoulli_(1 - p);
    const Tensor mask = factors.to(torch::kBool);
    context->save_for_backward({mask});
    context->saved_data["p"] = p;
    factors.div_(1 - p);
    return factors.mul_(x);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("dropout", "torch::dropout");
    const double p = context->saved_data["p"].toDouble();
    const Tensor mask = context->get_saved_variables()[0];
    Tensor factors = mask.to(gradients[0].scalar_type()).div_(1 - p);
    return {factors.mul_(gradients[0]), {}};
  }
};

}  // namespace

Tensor fallback::dropout(const Tensor& x, double p, bool train) {
  return torch::dropout(x, p, train);
}

Tensor dropout(const Tensor& x, double p, bool train) {
  // With p = 1 LibTorch draws no random numbers. For layouts that are not contiguous, the
  // order in which it draws depends on its version.
  if (!x.is_cpu() || !train || p <= 0 || p >= 1 || x.numel() == 0 ||
      !x.is_contiguous()) {
    return fallback::dropout(x, p, train);
  }
  return DropoutOperator::apply(x, p);
}

}  // namespace reprise::ops
