#include "ops/function.h"
#include "ops/kernels.h"
#include "ops/rotate_heads.h"

#include <reprise/ops/attention.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <vector>

namespace reprise::ops {
namespace {

namespace kernels = reprise::detail::kernels;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Heads `first` to `first + count` of qkv (N, T, R), as (N, count, T, dim). Shares the
/// memory of qkv, but is no view to autograd.
Tensor heads_of(const Tensor& qkv, int64_t first, int64_t count, int64_t dim) {
  const int64_t samples = qkv.size(0), positions = qkv.size(1);
  const int64_t row = qkv.size(2);
  Tensor heads = torch::empty({0}, qkv.options().requires_grad(false));
  return heads.set_(qkv.storage(), qkv.storage_offset() + first * dim,
                    {samples, count, positions, dim},
                    {positions * row, dim, row, 1});
}

variable_list all_heads_of(const Tensor& qkv, int64_t heads, int64_t kv_heads) {
  const int64_t dim = qkv.size(2) / (heads + 2 * kv_heads);
  return {heads_of(qkv, 0, heads, dim), heads_of(qkv, heads, kv_heads, dim),
          heads_of(qkv, heads + kv_heads, kv_heads, dim)};
}

/// Whether the angles are the same for all samples.
bool is_shared_table(const Tensor& cos) {
  return cos.dim() == 2;
}

class SplitHeadsOperator
    : public torch::autograd::Function<SplitHeadsOperator> {
 public:
  /// `cos` and `sin`: empty if nothing is rotated.
  static variable_list forward(AutogradContext* context, const Tensor& qkv,
                               const Tensor& cos, const Tensor& sin,
                               int64_t heads, int64_t kv_heads) {
    context->saved_data["heads"] = heads;
    context->saved_data["kv_heads"] = kv_heads;
    context->saved_data["sizes"] = qkv.sizes();
    const auto parts = all_heads_of(qkv, heads, kv_heads);
    if (cos.numel() == 0) return parts;
    if (is_shared_table(cos)) {
      // Not as saved variables, as in ops::rotary().
      context->saved_data["cos"] = cos;
      context->saved_data["sin"] = sin;
    } else {
      context->save_for_backward({cos, sin});
    }
    kernels::RotateHeads launch;
    TORCH_INTERNAL_ASSERT(detail::prepare_rotation(parts[0], cos, sin, launch));
    launch.parts[0] = detail::heads_part(parts[0], parts[0], true);
    launch.parts[1] = detail::heads_part(parts[1], parts[1], true);
    kernels::rotate_heads(launch, detail::kernel_stream(qkv));
    // Autograd must notice if another operator has saved qkv.
    qkv.unsafeGetTensorImpl()->bump_version();
    return parts;
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("split_heads", "ops::fallback::split_heads");
    auto& data = context->saved_data;
    const auto saved = context->get_saved_variables();
    Tensor cos, sin;
    if (data.count("cos") > 0) {
      cos = data["cos"].toTensor();
      sin = data["sin"].toTensor();
    } else if (!saved.empty()) {
      cos = saved[0];
      sin = saved[1];
    }
    const Tensor dqkv =
        torch::empty(data["sizes"].toIntVector(), gradients[0].options());
    const auto to =
        all_heads_of(dqkv, data["heads"].toInt(), data["kv_heads"].toInt());
    kernels::RotateHeads launch;
    TORCH_INTERNAL_ASSERT(detail::prepare_rotation(to[0], cos, sin, launch));
    launch.inverse = true;
    for (size_t i = 0; i < 3; ++i) {
      if (!detail::has_kernel_layout(gradients[i])) {
        gradients[i] = detail::as_aligned(gradients[i], 8);
      }
      launch.parts[i] =
          detail::heads_part(gradients[i], to[i], cos.defined() && i < 2);
    }
    kernels::rotate_heads(launch, detail::kernel_stream(dqkv));
    return {dqkv, {}, {}, {}, {}};
  }
};

void check_split_heads(const Tensor& qkv, int64_t heads, int64_t kv_heads,
                       const Tensor& cos, const Tensor& sin) {
  TORCH_CHECK(heads > 0 && kv_heads > 0 && qkv.dim() == 3 &&
                  qkv.size(2) % (heads + 2 * kv_heads) == 0,
              "[split_heads] expected qkv (N, T, (heads + 2 kv_heads) D), got ",
              qkv.sizes(), " for ", heads, " heads and ", kv_heads,
              " of keys and values");
  TORCH_CHECK(cos.defined() == sin.defined(),
              "[split_heads] expected cos and sin or neither, got one of them");
}

/// The kernel rotates in place, which autograd forbids for leaves and views of them.
bool is_expendable(const Tensor& qkv) {
  const auto is_fixed = [](const at::TensorBase& tensor) {
    return tensor.is_leaf() && tensor.requires_grad();
  };
  return !is_fixed(qkv) && !(qkv.is_view() && is_fixed(qkv._base()));
}

bool split_heads_eligible(const Tensor& qkv, int64_t heads, int64_t kv_heads,
                          const Tensor& cos, const Tensor& sin) {
  detail::KernelOperand packed;
  if (detail::is_half(qkv)) packed.type = detail::KernelOperand::Type::kHalf;
  if (!detail::kernel_eligible(qkv, packed) || !is_expendable(qkv)) {
    return false;
  }
  const torch::NoGradGuard no_grad;
  const auto parts = all_heads_of(qkv, heads, kv_heads);
  kernels::RotateHeads launch;
  return detail::prepare_rotation(parts[0], cos, sin, launch) &&
         detail::has_kernel_layout(parts[0]);
}

}  // namespace

QueryKeyValue fallback::split_heads(const Tensor& qkv, int64_t heads,
                                    int64_t kv_heads, const Tensor& cos,
                                    const Tensor& sin) {
  check_split_heads(qkv, heads, kv_heads, cos, sin);
  const int64_t dim = qkv.size(2) / (heads + 2 * kv_heads);
  const auto parts =
      qkv.split_with_sizes({heads * dim, kv_heads * dim, kv_heads * dim}, -1);
  const auto split = [dim](const Tensor& t) {
    return t.view({t.size(0), t.size(1), -1, dim}).transpose(1, 2);
  };
  const Tensor q = split(parts[0]), k = split(parts[1]), v = split(parts[2]);
  if (!cos.defined()) return {q, k, v};
  return {ops::rotary(q, cos, sin), ops::rotary(k, cos, sin), v};
}

QueryKeyValue split_heads(const Tensor& qkv, int64_t heads, int64_t kv_heads,
                          const Tensor& cos, const Tensor& sin) {
  check_split_heads(qkv, heads, kv_heads, cos, sin);
  if (!split_heads_eligible(qkv, heads, kv_heads, cos, sin)) {
    return fallback::split_heads(qkv, heads, kv_heads, cos, sin);
  }
  const Tensor none = qkv.detach().new_empty({0});
  const auto parts =
      SplitHeadsOperator::apply(qkv, cos.defined() ? cos : none,
                                sin.defined() ? sin : none, heads, kv_heads);
  return {parts[0], parts[1], parts[2]};
}

}  // namespace reprise::ops
