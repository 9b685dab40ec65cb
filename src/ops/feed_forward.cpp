#include "compat/autocast.h"
#include "ops/cuda/activation.h"
#include "ops/function.h"
#include "ops/gemm.h"
#include "ops/kernels.h"
#include "ops/linear_gradients.h"

#include <reprise/ops/linear.h>
#include <reprise/ops/weight_copies.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <functional>

namespace reprise::ops {
namespace {

namespace kernels = reprise::detail::kernels;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

kernels::ActivationKind kind_of(Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return kernels::ActivationKind::kGeluErf;
    case Activation::kGeluTanh:
      return kernels::ActivationKind::kGeluTanh;
    case Activation::kRelu:
      return kernels::ActivationKind::kRelu;
    case Activation::kSilu:
      return kernels::ActivationKind::kSilu;
  }
  TORCH_INTERNAL_ASSERT(false);
}

/// Whether a WeightCopies has a copy of `parameter` in `type`. Unlike WeightCopies::find(),
/// converts nothing.
bool has_copy(const Tensor& parameter, torch::ScalarType type) {
  return parameter.defined() &&
         (WeightCopies::converts_per_use(parameter, type) ||
          WeightCopies::find(parameter, type).defined());
}

Tensor run_activation(const Tensor& x, kernels::ActivationKind kind) {
  const Tensor y = torch::empty_like(x);
  kernels::ActivationForward launch;
  launch.count = x.numel();
  launch.type = detail::kernel_dtype(x);
  launch.kind = kind;
  launch.x = x.data_ptr();
  launch.y = y.data_ptr();
  kernels::activation_forward(launch, detail::kernel_stream(x));
  return y;
}

/// Replaces `dy` with dy · activation'(x) and adds the sum of its rows to the gradient of
/// `bias`, unless that is undefined. Writes the activation to `y` if it is defined.
void run_activation_backward(const Tensor& x, const Tensor& dy, const Tensor& y,
                             Tensor bias, kernels::ActivationKind kind) {
  kernels::ActivationBackward launch;
  launch.shape = {x.size(0), x.size(1), detail::kernel_dtype(x)};
  launch.kind = kind;
  launch.x = x.data_ptr();
  launch.dy = launch.dx = dy.data_ptr();
  if (y.defined()) launch.y = y.data_ptr();
  const auto single = x.options().dtype(torch::kFloat);
  Tensor sums, scratch;
  if (bias.defined()) {
    const Tensor& gradient = bias.grad();
    launch.add = detail::is_float32(gradient) && gradient.is_contiguous();
    sums = launch.add ? gradient : torch::empty({x.size(1)}, single);
    scratch = torch::empty({launch.shape.scratch_size()}, single);
    launch.sums = sums.data_ptr<float>();
    launch.scratch = scratch.data_ptr<float>();
  }
  kernels::activation_backward(launch, detail::kernel_stream(x));
  if (!bias.defined() || launch.add) return;
  Tensor& gradient = bias.mutable_grad();
  if (gradient.defined()) {
    gradient.add_(sums);
  } else {
    gradient = sums;
  }
}

/// Aligned and contiguous, as the kernels require.
Tensor for_kernel(const Tensor& x) {
  const Tensor contiguous = x.contiguous();
  const bool aligned =
      reinterpret_cast<uintptr_t>(contiguous.data_ptr()) % 16 == 0;
  return aligned ? contiguous : contiguous.clone();
}

/// activation(up) times the second weight. Adds the gradients of the second layer and of
/// `bias1` directly.
class FeedForwardDownOperator
    : public torch::autograd::Function<FeedForwardDownOperator> {
 public:
  /// `bias1`, `bias2`, `residual`: empty if there are none.
  static Tensor forward(AutogradContext* context, const Tensor& up,
                        const Tensor& bias1, const Tensor& weight,
                        const Tensor& bias2, const Tensor& copy, bool in_out,
                        int64_t kind, bool recompute, const Tensor& residual,
                        bool output_needed) {
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    const Tensor rows = for_kernel(detail::as_matrix(up));
    if (recompute) {
      detail::save_before_output(*context, {detail::as_saved(rows)});
    }
    Tensor hidden = rows;  // of the same shape, if nothing reads it
    if (output_needed || !recompute) {
      hidden = run_activation(rows, static_cast<kernels::ActivationKind>(kind));
    }
    if (!recompute) {
      detail::save_before_output(*context, {detail::as_saved(rows), hidden});
    }
    // Not as saved variables: the backward needs the tensors that own the gradients.
    auto& data = context->saved_data;
    data["weight"] = weight;
    if (bias1.numel() > 0) data["bias1"] = bias1;
    if (bias2.numel() > 0) data["bias2"] = bias2;
    if (!WeightCopies::converts_per_use(weight, copy.scalar_type())) {
      data["copy"] = copy;
    }
    data["in_out"] = in_out;
    data["kind"] = kind;
    data["sizes"] = up.sizes();
    const Tensor bias = bias2.numel() > 0
                            ? WeightCopies::find(bias2, copy.scalar_type())
                            : Tensor();
    const Tensor matrix = in_out ? copy : copy.t();
    const Tensor y =
        !output_needed ? detail::unused_product(hidden, matrix, residual)
        : residual.numel() > 0
            ? detail::gemm_plus(detail::as_matrix(residual), hidden, matrix,
                                detail::undefined_if_empty(bias2), bias)
            : detail::gemm(hidden, matrix, bias);
    auto sizes = up.sizes().vec();
    sizes.back() = y.size(1);
    return torch::_unsafe_view(y, sizes);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("feed_forward", "ops::fallback::feed_forward");
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const Tensor& rows = saved[0];
    const bool recompute = saved.size() == 1;
    const bool in_out = data["in_out"].toBool();
    const auto kind =
        static_cast<kernels::ActivationKind>(data["kind"].toInt());
    const Tensor dy = detail::as_matrix(gradients[0]).to(rows.scalar_type());
    Tensor weight = data["weight"].toTensor();
    const Tensor hidden = recompute ? torch::empty_like(rows) : saved[1];
    if (!recompute) add_gradients(*context, hidden, dy);
    const Tensor copy = data.count("copy") > 0
                            ? data["copy"].toTensor()
                            : weight.detach().to(rows.scalar_type());
    Tensor dup = detail::gemm(dy, in_out ? copy.t() : copy);
    run_activation_backward(
        rows, dup, recompute ? hidden : Tensor(),
        data.count("bias1") > 0 ? data["bias1"].toTensor() : Tensor(), kind);
    if (recompute) add_gradients(*context, hidden, dy);
    // Counted without the arguments that are not tensors.
    const bool residual = context->needs_input_grad(5);
    return {dup.view(data["sizes"].toIntVector()), {}, {}, {}, {}, {}, {}, {},
            residual ? gradients[0] : Tensor(),    {}};
  }

 private:
  /// Gradients of the second layer, whose input was `hidden`.
  static void add_gradients(AutogradContext& context, const Tensor& hidden,
                            const Tensor& dy) {
    auto& data = context.saved_data;
    const bool in_out = data["in_out"].toBool();
    Tensor weight = data["weight"].toTensor();
    std::function<void()> sums;
    if (data.count("bias2") > 0) {
      sums = [&] {
        Tensor bias = data["bias2"].toTensor();
        detail::add_bias_gradient(bias.mutable_grad(), dy, weight);
      };
    }
    detail::run_gradient_work(
        weight, hidden, dy,
        [&] {
          detail::add_weight_gradient(weight, in_out ? hidden.t() : dy.t(),
                                      in_out ? dy : hidden);
        },
        sums);
  }
};

}  // namespace

bool has_fused_feed_forward(const Tensor& x, const FeedForwardLayers& layers) {
  const auto type = compat::autocast_type(x);
  if (c10::elementSize(type) != 2 || !detail::kernels_available(x.device()) ||
      x.numel() == 0) {
    return false;
  }
  const auto copied = [type](const Tensor& bias) {
    return !bias.defined() || has_copy(bias, type);
  };
  const int64_t hidden_dim = layers.layout == WeightLayout::kOutIn ? 1 : 0;
  return has_copy(layers.weight1, type) && has_copy(layers.weight2, type) &&
         copied(layers.bias1) && copied(layers.bias2) &&
         layers.weight2.size(hidden_dim) % 8 == 0;
}

Tensor activate(const Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return torch::gelu(x);
    case Activation::kGeluTanh:
      return torch::gelu(x, "tanh");
    case Activation::kRelu:
      return torch::relu(x);
    case Activation::kSilu:
      return torch::silu(x);
  }
  TORCH_INTERNAL_ASSERT(false);
}

Tensor feed_forward_up(const Tensor& x, const FeedForwardLayers& layers) {
  Tensor bias = layers.bias1;
  // Its copy requires no gradient: feed_forward_down() adds that of the bias.
  if (bias.defined() && has_fused_feed_forward(x, layers)) {
    bias = WeightCopies::find(bias, compat::autocast_type(x));
  }
  return linear(x, layers.weight1, bias, layers.layout);
}

Tensor feed_forward_down(const Tensor& up, const FeedForwardLayers& layers,
                         Activation activation, bool recompute_activation,
                         const Tensor& residual, bool output_needed) {
  const Tensor& weight = layers.weight2;
  if (!has_fused_feed_forward(up, layers)) {
    return linear(activate(up, activation), weight, layers.bias2, layers.layout,
                  residual, output_needed);
  }
  const auto type = compat::autocast_type(up);
  const Tensor copy = WeightCopies::find(weight, type);
  return FeedForwardDownOperator::apply(
      up.to(type), detail::defined_or_empty(layers.bias1, copy), weight,
      detail::defined_or_empty(layers.bias2, copy), copy,
      layers.layout == WeightLayout::kInOut,
      static_cast<int64_t>(kind_of(activation)), recompute_activation,
      detail::defined_or_empty(residual, copy), output_needed);
}

Tensor feed_forward(const Tensor& x, const FeedForwardLayers& layers,
                    Activation activation, bool recompute_activation) {
  return feed_forward_down(feed_forward_up(x, layers), layers, activation,
                           recompute_activation);
}

Tensor fallback::feed_forward(const Tensor& x, const FeedForwardLayers& layers,
                              Activation activation) {
  const Tensor up = ops::linear(x, layers.weight1, layers.bias1, layers.layout);
  return ops::linear(activate(up, activation), layers.weight2, layers.bias2,
                     layers.layout);
}

}  // namespace reprise::ops
