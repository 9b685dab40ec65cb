#include <reprise/ops/dropout.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

namespace reprise {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class DropoutOperator : public torch::autograd::Function<DropoutOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x, double p) {
    // As LibTorch draws and scales.
    Tensor factors = torch::empty_like(x).bernoulli_(1 - p);
    const Tensor stays = factors.to(torch::kBool);
    context->save_for_backward({stays});
    context->saved_data["p"] = p;
    factors.div_(1 - p);
    return factors.mul_(x);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    TORCH_CHECK(!torch::GradMode::is_enabled(),
                "[lean_dropout] has no second derivative; use torch::dropout");
    const double p = context->saved_data["p"].toDouble();
    const Tensor stays = context->get_saved_variables()[0];
    Tensor factors = stays.to(gradients[0].scalar_type()).div_(1 - p);
    return {factors.mul_(gradients[0]), {}};
  }
};

}  // namespace

Tensor lean_dropout(const Tensor& x, double p, bool train) {
  // With p of 1 LibTorch draws nothing; other layouts than contiguous it draws
  // for in an order that depends on its version.
  if (!x.is_cpu() || !train || p <= 0 || p >= 1 || x.numel() == 0 ||
      !x.is_contiguous()) {
    return torch::dropout(x, p, train);
  }
  return DropoutOperator::apply(x, p);
}

}  // namespace reprise
