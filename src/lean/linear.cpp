#include <reprise/lean/linear.h>
#include <reprise/lean/weight_copies.h>
#include <reprise/torch/autocast.h>
#include <reprise/torch/products.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/torch.h>

namespace reprise {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Rows of the last dimension.
Tensor as_matrix(const Tensor& x) {
  return x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
}

Tensor plain(const Tensor& x, const Tensor& weight, const Tensor& bias,
             WeightLayout layout) {
  if (layout == WeightLayout::kOutIn) return torch::linear(x, weight, bias);
  const Tensor rows = as_matrix(x);
  const Tensor y = bias.defined() ? torch::addmm(bias, rows, weight)
                                  : torch::mm(rows, weight);
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(1);
  return y.view(sizes);
}

class LinearOperator : public torch::autograd::Function<LinearOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& weight, const Tensor& bias,
                        const Tensor& copy, bool in_out) {
    const compat::AutocastGuard none(compat::AutocastState{});
    const Tensor rows = as_matrix(x.to(copy.scalar_type()));
    context->save_for_backward({rows});
    // Not saved as variables: neither is an activation, and the weight must be
    // the very tensor whose gradient is added to.
    auto& data = context->saved_data;
    data["weight"] = weight;
    data["copy"] = copy;
    data["in_out"] = in_out;
    data["sizes"] = x.sizes();
    data["type"] = static_cast<int64_t>(x.scalar_type());
    const Tensor matrix = in_out ? copy : copy.t();
    const Tensor y =
        bias.numel() > 0
            ? torch::addmm(bias.to(copy.scalar_type()), rows, matrix)
            : torch::mm(rows, matrix);
    if (x.dim() == 2) return y;
    auto sizes = x.sizes().vec();
    sizes.back() = matrix.size(1);
    // Not a view to autograd: what follows may write over it.
    return torch::_unsafe_view(y, sizes);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    TORCH_CHECK(
        !torch::GradMode::is_enabled(),
        "[lean_linear] has no second derivative where weights have copies");
    const compat::AutocastGuard none(compat::AutocastState{});
    const Tensor rows = context->get_saved_variables()[0];
    auto& data = context->saved_data;
    const Tensor copy = data["copy"].toTensor();
    const bool in_out = data["in_out"].toBool();
    const Tensor dy = as_matrix(gradients[0]).to(copy.scalar_type());
    Tensor dx, db;
    if (context->needs_input_grad(0)) {
      dx = torch::mm(dy, in_out ? copy.t() : copy)
               .view(data["sizes"].toIntVector())
               .to(static_cast<torch::ScalarType>(data["type"].toInt()));
    }
    if (context->needs_input_grad(1)) {
      Tensor weight = data["weight"].toTensor();
      add_to_gradient(weight, in_out ? rows.t() : dy.t(), in_out ? dy : rows);
    }
    if (context->needs_input_grad(2)) {
      // A sum over rows is slow to start in parallel; a product is not.
      const Tensor ones =
          WeightCopies::ones(data["weight"].toTensor(), dy.size(0));
      db = ones.defined()
               ? compat::product_as(ones, dy, torch::kFloat).view({-1})
               : dy.sum(0, false, torch::kFloat);
    }
    return {dx, {}, db, {}, {}};
  }

 private:
  static void add_to_gradient(Tensor& weight, const Tensor& a,
                              const Tensor& b) {
    Tensor& gradient = weight.mutable_grad();
    if (gradient.defined()) {
      compat::add_product(gradient, a, b);
    } else {
      gradient = compat::product_as(a, b, weight.scalar_type());
    }
  }
};

}  // namespace

Tensor lean_linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
                   WeightLayout layout) {
  const auto type = compat::autocast_type(x);
  const Tensor copy = WeightCopies::find(weight, type);
  if (!copy.defined()) return plain(x, weight, bias, layout);
  // The operator's arguments are all defined.
  const Tensor some = bias.defined() ? bias : copy.detach().new_empty({0});
  return LinearOperator::apply(x, weight, some, copy,
                               layout == WeightLayout::kInOut);
}

}  // namespace reprise
