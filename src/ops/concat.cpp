#include "ops/channels_last.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/concat_channels.h"
#include "ops/function.h"
#include "ops/kernels.h"

#include <reprise/ops/concat.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <limits>

namespace reprise::ops {
namespace {

namespace kernels = reprise::detail::kernels;
using kernels::ConcatShape;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr auto kRows = at::MemoryFormat::ChannelsLast;

/// Sum over all pixels.
Tensor bias_gradient(const Tensor& db) {
  if (!detail::is_half(db)) return db.sum({0, 2, 3});
  kernels::ColumnSums launch;
  launch.shape = {db.numel() / db.size(1), db.size(1),
                  detail::kernel_dtype(db)};
  const auto options = db.options().dtype(torch::kFloat);
  const Tensor scratch = torch::empty({launch.shape.scratch_size()}, options);
  const Tensor sums = torch::empty({db.size(1)}, options);
  launch.matrix = db.data_ptr();
  launch.scratch = scratch.data_ptr<float>();
  launch.sums = sums.data_ptr<float>();
  kernels::column_sums(launch, detail::kernel_stream(db));
  return sums;
}

class ConcatOperator : public torch::autograd::Function<ConcatOperator> {
 public:
  /// `bias`: empty if there is none.
  static Tensor forward(AutogradContext* context, const Tensor& a,
                        const Tensor& b, const Tensor& bias) {
    const Tensor left = detail::as_rows(a, a.scalar_type());
    const Tensor right = detail::as_rows(b, b.scalar_type());
    const Tensor y =
        torch::empty({a.size(0), a.size(1) + b.size(1), a.size(2), a.size(3)},
                     a.options(), kRows);
    kernels::ConcatForward launch;
    launch.shape = {a.numel() / a.size(1), a.size(1), b.size(1),
                    detail::kernel_dtype(a)};
    launch.a = left.data_ptr();
    launch.b = right.data_ptr();
    launch.bias = detail::float_data(bias);
    launch.y = y.data_ptr();
    kernels::concat_forward(launch, detail::kernel_stream(a));
    context->saved_data["channels"] = a.size(1);
    context->saved_data["bias"] = bias.numel() > 0;
    return y;
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    detail::check_first_order("concat_channels", "torch::cat");
    const Tensor dy = detail::as_rows(gradients[0], gradients[0].scalar_type());
    const int64_t channels = context->saved_data["channels"].toInt();
    const auto part = [&](int64_t width) {
      return torch::empty({dy.size(0), width, dy.size(2), dy.size(3)},
                          dy.options(), kRows);
    };
    kernels::ConcatBackward launch;
    launch.shape = {dy.numel() / dy.size(1), channels, dy.size(1) - channels,
                    detail::kernel_dtype(dy)};
    launch.dy = dy.data_ptr();
    const bool biased = context->saved_data["bias"].toBool();
    Tensor da, db;
    if (context->needs_input_grad(0)) {
      da = part(launch.shape.a_channels);
      launch.da = da.data_ptr();
    }
    if (context->needs_input_grad(1) || biased) {
      db = part(launch.shape.b_channels);
      launch.db = db.data_ptr();
    }
    kernels::concat_backward(launch, detail::kernel_stream(dy));
    return {da, db, biased ? bias_gradient(db) : Tensor()};
  }
};

bool concat_eligible(const Tensor& a, const Tensor& b, const Tensor& bias) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  return a.scalar_type() == b.scalar_type() && a.device() == b.device() &&
         detail::rows_eligible(a) && detail::rows_eligible(b) &&
         (!bias.defined() || detail::is_float32(bias)) &&
         a.numel() + b.numel() < 4 * kMax;
}

void check_images(const Tensor& a, const Tensor& b, const Tensor& bias) {
  TORCH_CHECK(a.dim() == 4 && b.dim() == 4 && a.size(0) == b.size(0) &&
                  a.size(2) == b.size(2) && a.size(3) == b.size(3),
              "[concat_channels] expected (N, C, H, W) that differ in C only, "
              "got ",
              a.sizes(), " and ", b.sizes());
  TORCH_CHECK(!bias.defined() || (bias.dim() == 1 && bias.size(0) == b.size(1)),
              "[concat_channels] expected a bias for ", b.size(1),
              " channels, got ", bias.sizes());
}

}  // namespace

Tensor fallback::concat_channels(const Tensor& a, const Tensor& b,
                                 const Tensor& bias) {
  if (!bias.defined()) return torch::cat({a, b}, 1);
  return torch::cat({a, b + bias.to(b.scalar_type()).view({1, -1, 1, 1})}, 1);
}

Tensor concat_channels(const Tensor& a, const Tensor& b, const Tensor& bias) {
  check_images(a, b, bias);
  if (!concat_eligible(a, b, bias)) {
    return fallback::concat_channels(a, b, bias);
  }
  return ConcatOperator::apply(a, b, detail::defined_or_empty(bias, a));
}

}  // namespace reprise::ops
