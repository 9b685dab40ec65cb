#include "ops/cuda/swiglu.h"

#include "ops/function.h"
#include "ops/kernels.h"

#include <reprise/ops/linear.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <utility>

namespace reprise::ops {
namespace {

namespace kernels = reprise::detail::kernels;
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

/// Elements from one row of x (…, columns) to the next, if that is the same for all rows and
/// columns are adjacent; otherwise 0.
int64_t row_stride(const Tensor& x) {
  if (x.dim() == 0 || x.stride(-1) != 1) return 0;
  if (x.dim() == 1) return x.size(0);
  for (int64_t i = x.dim() - 3; i >= 0; --i) {
    if (x.stride(i) != x.stride(i + 1) * x.size(i + 1)) return 0;
  }
  return x.stride(-2);
}

/// Whether the kernels can read x, in rows.
bool is_kernel_rows(const Tensor& x) {
  if (!detail::kernels_available(x.device()) || x.numel() == 0 ||
      !(detail::is_float32(x) || detail::is_half(x))) {
    return false;
  }
  const int64_t width = 16 / static_cast<int64_t>(x.element_size());
  const int64_t stride = row_stride(x);
  return stride > 0 && stride % width == 0 && x.size(-1) % width == 0 &&
         detail::is_aligned(x, width);
}

kernels::SwigluShape swiglu_shape(const Tensor& gate, const Tensor& up) {
  kernels::SwigluShape shape;
  shape.columns = gate.size(-1);
  shape.rows = gate.numel() / shape.columns;
  shape.type = detail::kernel_dtype(gate);
  shape.gate_stride = row_stride(gate);
  shape.up_stride = row_stride(up);
  return shape;
}

Tensor run_swiglu_kernel(const Tensor& gate, const Tensor& up) {
  const Tensor result = torch::empty(gate.sizes(), gate.options());
  kernels::SwigluForward launch;
  launch.shape = swiglu_shape(gate, up);
  launch.gate = gate.data_ptr();
  launch.up = up.data_ptr();
  launch.result = result.data_ptr();
  kernels::swiglu_forward(launch, detail::kernel_stream(gate));
  return result;
}

/// Writes the gradients that are defined, which have equal strides.
void run_swiglu_gradient_kernel(const Tensor& gate, const Tensor& up,
                                const Tensor& dy, const Tensor& dgate,
                                const Tensor& dup) {
  const Tensor dresult = detail::as_aligned(dy, 8);
  kernels::SwigluBackward launch;
  launch.shape = swiglu_shape(gate, up);
  launch.gate = gate.data_ptr();
  launch.up = up.data_ptr();
  launch.dresult = dresult.data_ptr();
  launch.gradient_stride = row_stride(dgate.defined() ? dgate : dup);
  launch.dgate = dgate.defined() ? dgate.data_ptr() : nullptr;
  launch.dup = dup.defined() ? dup.data_ptr() : nullptr;
  kernels::swiglu_backward(launch, detail::kernel_stream(gate));
}

class SwigluOperator : public torch::autograd::Function<SwigluOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& gate,
                        const Tensor& up) {
    detail::save_before_output(*context, {gate, up});
    if (is_kernel_rows(gate) && is_kernel_rows(up)) {
      return run_swiglu_kernel(gate, up);
    }
    return silu_of(gate).mul_(up);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("swiglu", "ops::fallback::swiglu");
    const auto saved = context->get_saved_variables();
    const Tensor &gate = saved[0], &up = saved[1], &dy = gradients[0];
    const bool needs_gate = context->needs_input_grad(0);
    const bool needs_up = context->needs_input_grad(1);
    Tensor dgate, dup;
    if (is_kernel_rows(gate) && is_kernel_rows(up)) {
      const auto like = [&](bool needed) {
        return needed ? torch::empty(gate.sizes(), gate.options()) : Tensor();
      };
      dgate = like(needs_gate);
      dup = like(needs_up);
      run_swiglu_gradient_kernel(gate, up, dy, dgate, dup);
      return {dgate, dup};
    }
    if (needs_gate) dgate = silu_gradient(dy * up, gate);
    if (needs_up) dup = silu_of(gate).mul_(dy);
    return {dgate, dup};
  }
};

/// The halves of the last dimension.
std::pair<Tensor, Tensor> gate_and_up(const Tensor& packed) {
  const int64_t columns = packed.size(-1) / 2;
  return {packed.narrow(-1, 0, columns), packed.narrow(-1, columns, columns)};
}

/// Writes the gradients of both halves to one tensor.
class PackedSwigluOperator
    : public torch::autograd::Function<PackedSwigluOperator> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& packed) {
    detail::save_before_output(*context, {packed});
    const auto [gate, up] = gate_and_up(packed);
    return run_swiglu_kernel(gate, up);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("packed_swiglu", "ops::fallback::swiglu");
    const Tensor packed = context->get_saved_variables()[0];
    const Tensor dpacked = torch::empty(packed.sizes(), packed.options());
    const auto [gate, up] = gate_and_up(packed);
    const auto [dgate, dup] = gate_and_up(dpacked);
    run_swiglu_gradient_kernel(gate, up, gradients[0], dgate, dup);
    return {dpacked};
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

Tensor packed_swiglu(const Tensor& packed) {
  TORCH_CHECK(packed.dim() >= 1 && packed.size(-1) % 2 == 0,
              "[packed_swiglu] expected (…, 2 M), got ", packed.sizes());
  const auto [gate, up] = gate_and_up(packed);
  if (!is_kernel_rows(gate) || !is_kernel_rows(up)) return swiglu(gate, up);
  return PackedSwigluOperator::apply(packed);
}

}  // namespace reprise::ops
