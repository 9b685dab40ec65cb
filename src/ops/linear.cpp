#include "compat/autocast.h"
#include "compat/cuda.h"
#include "compat/gemm.h"
#include "compat/side_stream.h"
#include "ops/cuda/column_sums.h"
#include "ops/products.h"

#include <reprise/ops/linear.h>
#include <reprise/ops/weight_copies.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <functional>
#include <utility>

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
    lean::add_product(gradient, a, b);
  } else {
    gradient = lean::product_as(a, b, weight.scalar_type());
  }
}

/// Whether a kernel adds up the rows of `dy`. Of few rows a product with ones is as fast,
/// and one launch.
bool sums_by_kernel(const Tensor& dy) {
  constexpr int64_t kManyRows = 4096;
  return kernels::column_sums_kernel_built() && dy.is_cuda() &&
         dy.element_size() == 2 && dy.size(0) >= kManyRows &&
         dy.size(1) % 8 == 0 && dy.is_contiguous();
}

/// sums = (add ? sums : 0) + the sum of the rows.
void sum_by_kernel(Tensor& sums, const Tensor& dy, bool add) {
  const kernels::MatrixShape shape{dy.size(0), dy.size(1),
                                   dy.scalar_type() == torch::kHalf
                                       ? kernels::Values::kHalf
                                       : kernels::Values::kBfloat16};
  const Tensor scratch = torch::empty({shape.scratch()}, sums.options());
  kernels::column_sums(shape, dy.data_ptr(), scratch.data_ptr<float>(),
                       sums.data_ptr<float>(), add,
                       compat::current_cuda_stream(dy.device().index()));
}

/// For the bias of `weight`. A sum over rows is slow to start in parallel; a product
/// is not.
Tensor sum_of_rows(const Tensor& dy, const Tensor& weight) {
  if (sums_by_kernel(dy)) {
    Tensor sums = torch::empty({dy.size(1)}, dy.options().dtype(torch::kFloat));
    sum_by_kernel(sums, dy, false);
    return sums;
  }
  const Tensor ones = WeightCopies::ones(weight, dy.size(0));
  return ones.defined() ? compat::product_as(ones, dy, torch::kFloat).view({-1})
                        : dy.sum(0, false, torch::kFloat);
}

void add_to_bias(Tensor& gradient, const Tensor& dy, const Tensor& weight) {
  const Tensor ones = WeightCopies::ones(weight, dy.size(0));
  if (!gradient.defined()) {
    gradient = sum_of_rows(dy, weight);
  } else if (sums_by_kernel(dy) && gradient.is_contiguous()) {
    sum_by_kernel(gradient, dy, true);
  } else if (ones.defined()) {
    Tensor row = gradient.view({1, -1});
    compat::add_product(row, ones, dy);
  } else {
    gradient.add_(sum_of_rows(dy, weight));
  }
}

/// Gradients of weights: beside the backward where nothing else there adds to them, in
/// half precision. Products in single precision fill a device for themselves, and a
/// second stream has a workspace of its own.
void run_alone(const Tensor& weight, std::vector<Tensor> used,
               const std::function<void()>& work) {
  if (used[0].element_size() == 2 && WeightCopies::alone(weight)) {
    compat::run_beside(std::move(used), work);
  } else {
    work();
  }
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

/// For the backward; not one that this use made for itself.
void keep_copy(AutogradContext& context, const Tensor& copy,
               const Tensor& weight) {
  if (WeightCopies::each_use(weight, copy.scalar_type())) return;
  context.saved_data["copy"] = copy;
}
/// Of one weight, or of several that lie together.
Tensor kept_copy(AutogradContext& context, const std::vector<Tensor>& weights,
                 torch::ScalarType type) {
  auto& data = context.saved_data;
  return data.count("copy") > 0 ? data["copy"].toTensor()
                                : as_one(weights).to(type);
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
    const Tensor bias_copy = WeightCopies::find(bias, copy.scalar_type());
    if (bias_copy.defined()) data["bias"] = bias;
    keep_copy(*context, copy, weight);
    data["in_out"] = in_out;
    data["sizes"] = x.sizes();
    data["type"] = static_cast<int64_t>(x.scalar_type());
    const Tensor matrix = in_out ? copy : copy.t();
    const Tensor added =
        bias_copy.defined() ? bias_copy : bias.to(copy.scalar_type());
    const Tensor y =
        lean::product(rows, matrix, bias.numel() > 0 ? added : Tensor());
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
    const bool in_out = data["in_out"].toBool();
    const Tensor dy = as_matrix(gradients[0]).to(rows.scalar_type());
    Tensor weight = data["weight"].toTensor();
    Tensor bias = data.count("bias") > 0 ? data["bias"].toTensor() : Tensor();
    run_alone(weight, {rows, dy}, [&] {
      if (context->needs_input_grad(1)) {
        add_to_gradient(weight, in_out ? rows.t() : dy.t(), in_out ? dy : rows);
      }
      if (bias.defined() && context->needs_input_grad(2)) {
        add_to_bias(bias.mutable_grad(), dy, weight);
      }
    });
    Tensor dx, db;
    if (context->needs_input_grad(0)) {
      const Tensor copy = kept_copy(*context, {weight}, rows.scalar_type());
      dx = lean::product(dy, in_out ? copy.t() : copy)
               .view(data["sizes"].toIntVector())
               .to(static_cast<torch::ScalarType>(data["type"].toInt()));
    }
    if (!bias.defined() && context->needs_input_grad(2)) {
      db = sum_of_rows(dy, weight);
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
                        const Tensor& copy, const Tensor& bias_copy) {
    const compat::AutocastGuard none(compat::AutocastState{});
    const Tensor rows = as_matrix(x.to(copy.scalar_type()));
    context->save_for_backward({as_saved(rows)});
    auto& data = context->saved_data;
    data["weights"] = std::vector<Tensor>{weight0, weight1, weight2};
    data["biases"] = std::vector<Tensor>{bias0, bias1, bias2};
    keep_copy(*context, copy, weight0);
    data["sizes"] = x.sizes();
    data["type"] = static_cast<int64_t>(x.scalar_type());
    const Tensor y = lean::product(rows, copy.t(), bias_copy);
    auto sizes = x.sizes().vec();
    sizes.back() = copy.size(0);
    return torch::_unsafe_view(y, sizes);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    TORCH_CHECK(!torch::GradMode::is_enabled(),
                "[qkv_linear] has no second derivative");
    const compat::AutocastGuard none(compat::AutocastState{});
    const Tensor rows = context->get_saved_variables()[0];
    auto& data = context->saved_data;
    const auto weights = data["weights"].toTensorVector();
    const auto biases = data["biases"].toTensorVector();
    const Tensor dy = as_matrix(gradients[0]).to(rows.scalar_type());
    run_alone(weights[0], {rows, dy}, [&] {
      add_to_all(
          weights, [&](Tensor& sum) { lean::add_product(sum, dy.t(), rows); },
          [&] {
            return lean::product_as(dy.t(), rows, weights[0].scalar_type());
          });
      add_to_all(
          biases, [&](Tensor& sum) { add_to_bias(sum, dy, weights[0]); },
          [&] { return sum_of_rows(dy, weights[0]); });
    });
    Tensor dx;
    if (context->needs_input_grad(0)) {
      dx = lean::product(dy, kept_copy(*context, weights, rows.scalar_type()))
               .view(data["sizes"].toIntVector())
               .to(static_cast<torch::ScalarType>(data["type"].toInt()));
    }
    return {dx, {}, {}, {}, {}, {}, {}, {}, {}};
  }

 private:
  /// `add` adds to the gradients of all `parameters`, as one; `make` makes that.
  static void add_to_all(std::vector<Tensor> parameters,
                         const std::function<void(Tensor&)>& add,
                         const std::function<Tensor()>& make) {
    std::vector<Tensor> there;
    for (const Tensor& parameter : parameters) {
      if (parameter.grad().defined()) there.push_back(parameter.grad());
    }
    if (there.size() == parameters.size() && lie_together(there)) {
      Tensor all = as_one(there);
      add(all);
      return;
    }
    const Tensor fresh = make();
    int64_t first = 0;
    for (Tensor& parameter : parameters) {
      const Tensor part = fresh.narrow(0, first, parameter.size(0));
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

Tensor qkv_linear(const Tensor& x, const std::array<Tensor, 3>& weights,
                  const std::array<Tensor, 3>& biases) {
  const auto type = compat::autocast_type(x);
  const auto copies_of = [type](const std::array<Tensor, 3>& parameters) {
    std::vector<Tensor> copies;
    if (WeightCopies::each_use(parameters[0], type)) {
      copies.assign(parameters.begin(), parameters.end());
      const bool whole = lie_together(copies);
      return whole ? as_one(copies).to(type) : Tensor();
    }
    for (const Tensor& parameter : parameters) {
      const Tensor copy = WeightCopies::find(parameter, type);
      if (copy.defined()) copies.push_back(copy);
    }
    const bool whole = copies.size() == 3 && lie_together(copies);
    return whole ? as_one(copies) : Tensor();
  };
  const Tensor weight = copies_of(weights), bias = copies_of(biases);
  if (!weight.defined() || !bias.defined()) return {};
  return LinearsOperator::apply(x, weights[0], weights[1], weights[2],
                                biases[0], biases[1], biases[2], weight, bias);
}

}  // namespace reprise
