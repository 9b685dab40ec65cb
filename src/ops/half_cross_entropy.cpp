#include "ops/half_cross_entropy.h"

#include "compat/cuda.h"
#include "compat/gemm.h"
#include "ops/cuda/cross_entropy.h"
#include "ops/for_parts.h"

#include <torch/types.h>

#include <limits>

namespace reprise {
namespace {

using torch::Tensor;

// A product whose sizes are no multiples of this runs at a fraction of the speed:
// what is left beside them is a small product of its own.
constexpr int64_t kRoundProduct = 128;

/// sum (V, D) += scoresᵀ (V', n) · rows (n, D)
void add_weight_gradient(Tensor sum, const Tensor& scores, const Tensor& rows) {
  const int64_t round = sum.size(0) / kRoundProduct * kRoundProduct;
  for (const auto& [first, count] :
       {std::pair(int64_t{0}, round), std::pair(round, sum.size(0) - round)}) {
    if (count == 0) continue;
    Tensor part = sum.narrow(0, first, count);
    compat::add_product(part, scores.narrow(1, first, count).t(), rows);
  }
}

kernels::ScoresShape shape_of(const Tensor& scores, int64_t columns) {
  return {scores.size(0), columns, scores.stride(0),
          scores.scalar_type() == torch::kHalf ? kernels::Values::kHalf
                                               : kernels::Values::kBfloat16};
}

}  // namespace

Tensor HalfCrossEntropy::padded_bias(const Tensor& bias, int64_t columns,
                                     int64_t padded,
                                     const torch::TensorOptions& options) {
  if (!bias.defined() && padded == columns) return {};
  const Tensor whole =
      torch::full({padded}, -std::numeric_limits<double>::infinity(), options);
  Tensor real = whole.narrow(0, 0, columns);
  if (bias.defined()) {
    real.copy_(bias);
  } else {
    real.zero_();
  }
  return whole;
}

Tensor HalfCrossEntropy::scores(int64_t first, int64_t count) const {
  const Tensor rows = hidden.narrow(0, first, count);
  return bias.defined() ? torch::addmm(bias, rows, weight.t())
                        : torch::mm(rows, weight.t());
}

/// Of the targets, as columns; 0 where one is ignored.
Tensor HalfCrossEntropy::places(int64_t first, int64_t count) const {
  const Tensor some = targets.narrow(0, first, count);
  return some.masked_fill(some.eq(ignore_index), 0).unsqueeze(1);
}

bool HalfCrossEntropy::has_kernels(const Tensor& hidden) {
  return kernels::cross_entropy_kernels_built() && hidden.is_cuda();
}

void HalfCrossEntropy::compute_forward(const Tensor& scores, int64_t first,
                                       int64_t count, Result& result) const {
  const Tensor some = targets.narrow(0, first, count);
  const Tensor picked = result.left.picked.narrow(0, first, count);
  if (has_kernels(hidden)) {
    kernels::cross_entropy_forward(
        shape_of(scores, columns), scores.data_ptr(), some.data_ptr<int64_t>(),
        ignore_index,
        result.left.log_total.narrow(0, first, count).data_ptr<float>(),
        picked.data_ptr<float>(),
        result.right.defined() ? result.right.data_ptr<int64_t>() : nullptr,
        compat::current_cuda_stream(hidden.device().index()));
    return;
  }
  if (result.right.defined()) {
    result.right += scores.argmax(1).eq(some).sum();
  }
  const Tensor logarithms = torch::log_softmax(scores.to(torch::kFloat), 1);
  picked.copy_(logarithms.gather(1, places(first, count)));
}

HalfCrossEntropy::Result HalfCrossEntropy::forward(bool count_right) const {
  const auto single = hidden.options().dtype(torch::kFloat);
  const bool keeps = has_kernels(hidden);
  Result result;
  result.left.picked = torch::empty({hidden.size(0), 1}, single);
  if (keeps) result.left.log_total = torch::empty({hidden.size(0)}, single);
  if (count_right) {
    result.right = torch::zeros({}, targets.options().dtype(torch::kLong));
  }
  for_parts(hidden.size(0), rows_at_a_time, [&](int64_t first, int64_t count) {
    const Tensor some = scores(first, count);
    compute_forward(some, first, count, result);
    if (keeps && count == hidden.size(0)) result.left.scores = some;
  });
  const Tensor ignored = targets.eq(ignore_index).unsqueeze(1);
  result.loss = result.left.picked.masked_fill(ignored, 0).sum().neg();
  return result;
}

Tensor HalfCrossEntropy::compute_backward(const Tensor& scores, int64_t first,
                                          int64_t count,
                                          const ForwardState& left) const {
  const Tensor picked = left.picked.narrow(0, first, count);
  if (left.log_total.defined()) {
    kernels::cross_entropy_backward(
        shape_of(scores, columns), scores.data_ptr(),
        targets.narrow(0, first, count).data_ptr<int64_t>(), ignore_index,
        left.log_total.narrow(0, first, count).data_ptr<float>(),
        picked.data_ptr<float>(),
        compat::current_cuda_stream(hidden.device().index()));
    return scores;
  }
  const Tensor values = torch::softmax(scores, 1);
  values.scatter_(1, places(first, count),
                  picked.expm1().to(values.scalar_type()));
  return values;
}

void HalfCrossEntropy::backward(const Tensor& loss_gradient,
                                const ForwardState& left,
                                Gradients& gradients) const {
  const auto type = hidden.scalar_type();
  const Tensor factors =
      loss_gradient.to(torch::kFloat)
          .expand({hidden.size(0), 1})
          .masked_fill(targets.eq(ignore_index).unsqueeze(1), 0);
  const Tensor scaled = (hidden * factors).to(type);
  for_parts(hidden.size(0), rows_at_a_time, [&](int64_t first, int64_t count) {
    const Tensor values = compute_backward(
        left.scores.defined() ? left.scores : scores(first, count), first,
        count, left);
    const Tensor factor = factors.narrow(0, first, count);
    if (gradients.hidden.defined()) {
      gradients.hidden.narrow(0, first, count)
          .copy_(
              compat::product_as(values, weight, torch::kFloat).mul_(factor));
    }
    if (gradients.weight_sum.defined()) {
      add_weight_gradient(gradients.weight_sum, values,
                          scaled.narrow(0, first, count));
    }
    if (gradients.bias_sum.defined()) {
      gradients.bias_sum.add_(
          compat::product_as(values.t(), factor.to(type), torch::kFloat)
              .squeeze(1)
              .narrow(0, 0, columns));
    }
  });
}

}  // namespace reprise
