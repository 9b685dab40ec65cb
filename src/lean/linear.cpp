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

/// A view of an input counts as a leaf that needs a gradient, which saved-tensor hooks
/// cannot give back.
Tensor as_saved(const Tensor& rows) {
  return rows.detach();
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

void add_to_gradient(Tensor& weight, const Tensor& a, const Tensor& b) {
  Tensor& gradient = weight.mutable_grad();
  if (gradient.defined()) {
    compat::add_product(gradient, a, b);
  } else {
    gradient = compat::product_as(a, b, weight.scalar_type());
  }
}

/// For the bias of `weight`. A sum over rows is slow to start in parallel; a product
/// is not.
Tensor sum_of_rows(const Tensor& dy, const Tensor& weight) {
  const Tensor ones = WeightCopies::ones(weight, dy.size(0));
  return ones.defined() ? compat::product_as(ones, dy, torch::kFloat).view({-1})
                        : dy.sum(0, false, torch::kFloat);
}

bool lie_together(const std::vector<Tensor>& tensors) {
  const Tensor& first = tensors.front();
  int64_t offset = first.storage_offset();
  for (const Tensor& tensor : tensors) {
    if (!tensor.is_alias_of(first) || !tensor.is_contiguous() ||
        tensor.storage_offset() != offset || tensor.dim() != first.dim() ||
        (tensor.dim() == 2 && tensor.size(1) != first.size(1))) {
      return false;
    }
    offset += tensor.numel();
  }
  return true;
}

/// Tensors that lie together, as one.
Tensor as_one(const std::vector<Tensor>& tensors) {
  auto sizes = tensors.front().sizes().vec();
  sizes[0] = 0;
  for (const Tensor& tensor : tensors) sizes[0] += tensor.size(0);
  return tensors.front().detach().as_strided(sizes, tensors.front().strides(),
                                             tensors.front().storage_offset());
}

class LinearOperator : public torch::autograd::Function<LinearOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& weight, const Tensor& bias,
                        const Tensor& copy, bool in_out) {
    const compat::AutocastGuard none(compat::AutocastState{});
    const Tensor rows = as_matrix(x.to(copy.scalar_type()));
    context->save_for_backward({as_saved(rows)});
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
      db = sum_of_rows(dy, data["weight"].toTensor());
    }
    return {dx, {}, db, {}, {}};
  }
};

/// The same of three weights that lie together, `copy` being that of them all.
class LinearsOperator : public torch::autograd::Function<LinearsOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& weight0, const Tensor& weight1,
                        const Tensor& weight2, const Tensor& bias0,
                        const Tensor& bias1, const Tensor& bias2,
                        const Tensor& copy) {
    const compat::AutocastGuard none(compat::AutocastState{});
    const Tensor rows = as_matrix(x.to(copy.scalar_type()));
    context->save_for_backward({as_saved(rows)});
    auto& data = context->saved_data;
    data["weights"] = std::vector<Tensor>{weight0, weight1, weight2};
    data["copy"] = copy;
    data["sizes"] = x.sizes();
    data["type"] = static_cast<int64_t>(x.scalar_type());
    const Tensor bias = as_one({bias0, bias1, bias2});
    const Tensor y = torch::addmm(bias.to(copy.scalar_type()), rows, copy.t());
    auto sizes = x.sizes().vec();
    sizes.back() = copy.size(0);
    return torch::_unsafe_view(y, sizes);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    TORCH_CHECK(!torch::GradMode::is_enabled(),
                "[lean_linears] has no second derivative");
    const compat::AutocastGuard none(compat::AutocastState{});
    const Tensor rows = context->get_saved_variables()[0];
    auto& data = context->saved_data;
    const Tensor copy = data["copy"].toTensor();
    std::vector<Tensor> weights = data["weights"].toTensorVector();
    const Tensor dy = as_matrix(gradients[0]).to(copy.scalar_type());
    Tensor dx;
    if (context->needs_input_grad(0)) {
      dx = torch::mm(dy, copy)
               .view(data["sizes"].toIntVector())
               .to(static_cast<torch::ScalarType>(data["type"].toInt()));
    }
    add_to_gradients(weights, dy, rows);
    const Tensor db = sum_of_rows(dy, weights[0]);
    variable_list result = {dx, {}, {}, {}};
    int64_t first = 0;
    for (const Tensor& weight : weights) {
      result.push_back(db.narrow(0, first, weight.size(0)));
      first += weight.size(0);
    }
    result.emplace_back();
    return result;
  }

 private:
  static void add_to_gradients(std::vector<Tensor>& weights, const Tensor& dy,
                               const Tensor& rows) {
    std::vector<Tensor> there;
    for (const Tensor& weight : weights) {
      if (weight.grad().defined()) there.push_back(weight.grad());
    }
    if (there.size() == weights.size() && lie_together(there)) {
      Tensor all = as_one(there);
      compat::add_product(all, dy.t(), rows);
      return;
    }
    const Tensor fresh =
        there.empty()
            ? compat::product_as(dy.t(), rows, weights[0].scalar_type())
            : Tensor();
    int64_t first = 0;
    for (Tensor& weight : weights) {
      const int64_t count = weight.size(0);
      if (fresh.defined()) {
        weight.mutable_grad() = fresh.narrow(0, first, count);
      } else {
        add_to_gradient(weight, dy.narrow(1, first, count).t(), rows);
      }
      first += count;
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

void lay_together(const std::vector<Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  const Tensor whole = torch::cat(parameters, 0);
  int64_t first = 0;
  for (Tensor parameter : parameters) {
    const int64_t count = parameter.size(0);
    parameter.set_data(whole.narrow(0, first, count));
    first += count;
  }
}

Tensor lean_linears(const Tensor& x, const std::array<Tensor, 3>& weights,
                    const std::array<Tensor, 3>& biases) {
  const auto type = compat::autocast_type(x);
  std::vector<Tensor> copies;
  for (const Tensor& weight : weights) {
    const Tensor copy = WeightCopies::find(weight, type);
    if (!copy.defined()) return {};
    copies.push_back(copy);
  }
  if (!lie_together(copies) ||
      !lie_together({biases[0], biases[1], biases[2]})) {
    return {};
  }
  return LinearsOperator::apply(x, weights[0], weights[1], weights[2],
                                biases[0], biases[1], biases[2],
                                as_one(copies));
}

}  // namespace reprise
