#include "compat/autocast.h"
#include "ops/function.h"
#include "ops/gemm.h"
#include "ops/linear_gradients.h"

#include <reprise/ops/linear.h>
#include <reprise/ops/weight_copies.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <functional>
#include <utility>

namespace reprise::ops {
namespace {

using detail::add_bias_gradient;
using detail::add_weight_gradient;
using detail::as_matrix;
using detail::as_saved;
using detail::bias_gradient;
using detail::run_gradient_work;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Whether the tensors are adjacent in memory, in this order, and contiguous except for equal
/// distances between the rows of matrices.
bool are_packed(const std::vector<Tensor>& tensors) {
  const Tensor& first = tensors.front();
  int64_t offset = first.storage_offset();
  for (const Tensor& tensor : tensors) {
    if (!tensor.is_alias_of(first) || tensor.stride(-1) != 1 ||
        tensor.storage_offset() != offset || tensor.dim() != first.dim() ||
        tensor.dim() > 2 || tensor.strides() != first.strides() ||
        (tensor.dim() == 2 && tensor.size(1) != first.size(1))) {
      return false;
    }
    offset += tensor.size(0) * tensor.stride(0);
  }
  return true;
}

/// Packed tensors as one tensor.
Tensor concatenated_view(const std::vector<Tensor>& tensors) {
  auto sizes = tensors.front().sizes().vec();
  sizes[0] = 0;
  for (const Tensor& tensor : tensors) sizes[0] += tensor.size(0);
  return tensors.front().detach().as_strided(sizes, tensors.front().strides(),
                                             tensors.front().storage_offset());
}

/// Saves the copy of a weight for the backward, unless it was made for this use only.
void save_copy(AutogradContext& context, const Tensor& copy,
               const Tensor& weight) {
  if (WeightCopies::converts_per_use(weight, copy.scalar_type())) return;
  context.saved_data["copy"] = copy;
}
/// The saved copy of a weight, or of several packed ones; converts again if none was saved.
Tensor saved_copy(AutogradContext& context, const std::vector<Tensor>& weights,
                  torch::ScalarType type) {
  auto& data = context.saved_data;
  return data.count("copy") > 0 ? data["copy"].toTensor()
                                : concatenated_view(weights).to(type);
}

class LinearOperator : public torch::autograd::Function<LinearOperator> {
 public:
  /// `bias`, `residual`: empty if there are none.
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& weight, const Tensor& bias,
                        const Tensor& copy, bool in_out, const Tensor& residual,
                        bool output_needed) {
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    const Tensor rows = as_matrix(x.to(copy.scalar_type()));
    detail::save_before_output(*context, {as_saved(rows)});
    // Not as saved variables: these are no activations, and the backward needs the tensor
    // that owns the gradient.
    auto& data = context->saved_data;
    data["weight"] = weight;
    const Tensor bias_copy = WeightCopies::find(bias, copy.scalar_type());
    if (bias_copy.defined()) data["bias"] = bias;
    save_copy(*context, copy, weight);
    data["in_out"] = in_out;
    data["sizes"] = x.sizes();
    data["type"] = static_cast<int64_t>(x.scalar_type());
    const Tensor matrix = in_out ? copy : copy.t();
    const Tensor added =
        bias_copy.defined() ? bias_copy : bias.to(copy.scalar_type());
    const Tensor rounded = bias.numel() > 0 ? added : Tensor();
    const Tensor y =
        !output_needed ? detail::unused_product(rows, matrix, residual)
        : residual.numel() > 0
            ? detail::gemm_plus(as_matrix(residual), rows, matrix,
                                detail::undefined_if_empty(bias), rounded)
            : detail::gemm(rows, matrix, rounded);
    if (x.dim() == 2) return y;
    auto sizes = x.sizes().vec();
    sizes.back() = matrix.size(1);
    // Not a view to autograd, so that the next operator may work in place.
    return torch::_unsafe_view(y, sizes);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("linear", "it without WeightCopies");
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    const Tensor rows = context->get_saved_variables()[0];
    auto& data = context->saved_data;
    const bool in_out = data["in_out"].toBool();
    const Tensor dy = as_matrix(gradients[0]).to(rows.scalar_type());
    Tensor weight = data["weight"].toTensor();
    Tensor bias = data.count("bias") > 0 ? data["bias"].toTensor() : Tensor();
    std::function<void()> sums;
    if (bias.defined() && context->needs_input_grad(2)) {
      sums = [&] { add_bias_gradient(bias.mutable_grad(), dy, weight); };
    }
    run_gradient_work(
        weight, rows, dy,
        [&] {
          if (context->needs_input_grad(1)) {
            add_weight_gradient(weight, in_out ? rows.t() : dy.t(),
                                in_out ? dy : rows);
          }
        },
        sums);
    Tensor dx, db;
    if (context->needs_input_grad(0)) {
      const Tensor copy = saved_copy(*context, {weight}, rows.scalar_type());
      dx = detail::gemm(dy, in_out ? copy.t() : copy)
               .view(data["sizes"].toIntVector())
               .to(static_cast<torch::ScalarType>(data["type"].toInt()));
    }
    if (!bias.defined() && context->needs_input_grad(2)) {
      db = bias_gradient(dy, weight);
    }
    // Counted without `in_out`, which is not a tensor.
    const bool residual = context->needs_input_grad(4);
    return {dx, {}, db, {}, {}, residual ? gradients[0] : Tensor(), {}};
  }
};

/// Two or three packed weights as one layer. `copy` and `bias_copy` are the copies of all
/// of them. Empty: a third weight, or biases, if there are none.
class PackedLinearOperator
    : public torch::autograd::Function<PackedLinearOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x,
                        const Tensor& weight0, const Tensor& weight1,
                        const Tensor& weight2, const Tensor& bias0,
                        const Tensor& bias1, const Tensor& bias2,
                        const Tensor& copy, const Tensor& bias_copy) {
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    const Tensor rows = as_matrix(x.to(copy.scalar_type()));
    detail::save_before_output(*context, {as_saved(rows)});
    auto& data = context->saved_data;
    data["weights"] = not_empty({weight0, weight1, weight2});
    data["biases"] = not_empty({bias0, bias1, bias2});
    save_copy(*context, copy, weight0);
    data["sizes"] = x.sizes();
    data["type"] = static_cast<int64_t>(x.scalar_type());
    const Tensor y =
        detail::gemm(rows, copy.t(), detail::undefined_if_empty(bias_copy));
    auto sizes = x.sizes().vec();
    sizes.back() = copy.size(0);
    return torch::_unsafe_view(y, sizes);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("packed_linear");
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    const Tensor rows = context->get_saved_variables()[0];
    auto& data = context->saved_data;
    const auto weights = data["weights"].toTensorVector();
    const auto biases = data["biases"].toTensorVector();
    const Tensor dy = as_matrix(gradients[0]).to(rows.scalar_type());
    std::function<void()> sums;
    if (!biases.empty()) {
      sums = [&] {
        add_packed_gradient(
            biases,
            [&](Tensor& sum) { add_bias_gradient(sum, dy, weights[0]); },
            [&] { return bias_gradient(dy, weights[0]); });
      };
    }
    run_gradient_work(
        weights[0], rows, dy,
        [&] {
          add_packed_gradient(
              weights,
              [&](Tensor& sum) { detail::gemm_add(sum, dy.t(), rows); },
              [&] {
                return detail::gemm_as(dy.t(), rows,
                                       detail::gradient_type(weights[0]));
              });
        },
        sums);
    Tensor dx;
    if (context->needs_input_grad(0)) {
      dx = detail::gemm(dy, saved_copy(*context, weights, rows.scalar_type()))
               .view(data["sizes"].toIntVector())
               .to(static_cast<torch::ScalarType>(data["type"].toInt()));
    }
    return {dx, {}, {}, {}, {}, {}, {}, {}, {}};
  }

 private:
  static std::vector<Tensor> not_empty(std::vector<Tensor> tensors) {
    std::erase_if(tensors, [](const Tensor& t) { return t.numel() == 0; });
    return tensors;
  }

  /// Adds to the gradients of `parameters`: with `add` if all exist and are packed;
  /// otherwise `make` computes the gradient of all of them, which is divided.
  static void add_packed_gradient(std::vector<Tensor> parameters,
                                  const std::function<void(Tensor&)>& add,
                                  const std::function<Tensor()>& make) {
    std::vector<Tensor> existing;
    for (const Tensor& parameter : parameters) {
      if (parameter.grad().defined()) existing.push_back(parameter.grad());
    }
    if (existing.size() == parameters.size() && are_packed(existing)) {
      Tensor all = concatenated_view(existing);
      add(all);
      return;
    }
    const Tensor made = make();
    int64_t first = 0;
    for (Tensor& parameter : parameters) {
      const Tensor part = made.narrow(0, first, parameter.size(0));
      Tensor& gradient = parameter.mutable_grad();
      if (gradient.defined()) {
        gradient.add_(part);
      } else {
        gradient = part;
      }
      first += parameter.size(0);
    }
  }
};

/// The copies of packed parameters as one tensor; undefined if there are none, or if they
/// are not packed.
Tensor packed_copy(const std::vector<Tensor>& parameters,
                   torch::ScalarType type) {
  if (WeightCopies::converts_per_use(parameters[0], type)) {
    return are_packed(parameters) ? concatenated_view(parameters).to(type)
                                  : Tensor();
  }
  std::vector<Tensor> copies;
  for (const Tensor& parameter : parameters) {
    const Tensor copy = WeightCopies::find(parameter, type);
    if (!copy.defined()) return {};
    copies.push_back(copy);
  }
  return are_packed(copies) ? concatenated_view(copies) : Tensor();
}

void check_packed(const std::vector<Tensor>& weights,
                  const std::vector<Tensor>& biases) {
  TORCH_CHECK(weights.size() == 2 || weights.size() == 3,
              "[packed_linear] expected 2 or 3 weights, got ", weights.size());
  TORCH_CHECK(biases.empty() || biases.size() == weights.size(),
              "[packed_linear] expected no biases or one per weight, got ",
              biases.size(), " for ", weights.size(), " weights");
}

}  // namespace

Tensor fallback::linear(const Tensor& x, const Tensor& weight,
                        const Tensor& bias, WeightLayout layout) {
  if (layout == WeightLayout::kOutIn) return torch::linear(x, weight, bias);
  const Tensor rows = as_matrix(x);
  const Tensor y = bias.defined() ? torch::addmm(bias, rows, weight)
                                  : torch::mm(rows, weight);
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(1);
  return y.view(sizes);
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
              WeightLayout layout, const Tensor& residual, bool output_needed) {
  const Tensor copy = WeightCopies::find(weight, compat::autocast_type(x));
  if (!copy.defined()) {
    const Tensor y = fallback::linear(x, weight, bias, layout);
    return residual.defined() ? residual + y : y;
  }
  return LinearOperator::apply(x, weight, detail::defined_or_empty(bias, copy),
                               copy, layout == WeightLayout::kInOut,
                               detail::defined_or_empty(residual, copy),
                               output_needed);
}

std::vector<Tensor> fallback::packed_linear(const Tensor& x,
                                            const std::vector<Tensor>& weights,
                                            const std::vector<Tensor>& biases) {
  check_packed(weights, biases);
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    outputs.push_back(
        ops::linear(x, weights[i], biases.empty() ? Tensor() : biases[i]));
  }
  return outputs;
}

Tensor joined_linear(const Tensor& x, const std::vector<Tensor>& weights,
                     const std::vector<Tensor>& biases) {
  check_packed(weights, biases);
  const auto type = compat::autocast_type(x);
  const Tensor weight = packed_copy(weights, type);
  const Tensor bias = biases.empty() ? Tensor() : packed_copy(biases, type);
  if (!weight.defined() || (!biases.empty() && !bias.defined())) return {};
  const auto get = [&](const std::vector<Tensor>& list, size_t i) {
    return detail::defined_or_empty(i < list.size() ? list[i] : Tensor(), x);
  };
  return PackedLinearOperator::apply(x, weights[0], weights[1], get(weights, 2),
                                     get(biases, 0), get(biases, 1),
                                     get(biases, 2), weight,
                                     detail::defined_or_empty(bias, x));
}

std::vector<Tensor> packed_linear(const Tensor& x,
                                  const std::vector<Tensor>& weights,
                                  const std::vector<Tensor>& biases) {
  const Tensor all = joined_linear(x, weights, biases);
  if (!all.defined()) return fallback::packed_linear(x, weights, biases);
  std::vector<int64_t> sizes;
  for (const Tensor& part : weights) sizes.push_back(part.size(0));
  return all.split_with_sizes(sizes, -1);
}

void pack_contiguous(const std::vector<Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  const Tensor whole = torch::cat(parameters, 0);
  int64_t first = 0;
  for (Tensor parameter : parameters) {
    const int64_t count = parameter.size(0);
    parameter.set_data(whole.narrow(0, first, count));
    first += count;
  }
}

}  // namespace reprise::ops
