#include "half_cross_entropy.h"

#include "for_parts.h"

#include <reprise/torch/products.h>

#include <torch/torch.h>

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

HalfCrossEntropy::Result HalfCrossEntropy::forward(bool count_right) const {
  Result result;
  result.picked =
      torch::empty({hidden.size(0), 1}, hidden.options().dtype(torch::kFloat));
  if (count_right) {
    result.right = torch::zeros({}, targets.options().dtype(torch::kLong));
  }
  for_parts(hidden.size(0), rows_at_a_time, [&](int64_t first, int64_t count) {
    Tensor values = scores(first, count);
    if (count_right) {
      result.right +=
          values.argmax(1).eq(targets.narrow(0, first, count)).sum();
    }
    values = torch::log_softmax(values.to(torch::kFloat), 1);
    result.picked.narrow(0, first, count)
        .copy_(values.gather(1, places(first, count)));
  });
  const Tensor ignored = targets.eq(ignore_index).unsqueeze(1);
  result.loss = result.picked.masked_fill(ignored, 0).sum().neg();
  return result;
}

void HalfCrossEntropy::backward(const Tensor& loss_gradient,
                                const Tensor& picked,
                                Gradients& gradients) const {
  const auto type = hidden.scalar_type();
  const Tensor factors =
      loss_gradient.to(torch::kFloat)
          .expand({hidden.size(0), 1})
          .masked_fill(targets.eq(ignore_index).unsqueeze(1), 0);
  const Tensor at_target = picked.expm1().to(type);
  const Tensor scaled = (hidden * factors).to(type);
  for_parts(hidden.size(0), rows_at_a_time, [&](int64_t first, int64_t count) {
    const Tensor values = torch::softmax(scores(first, count), 1);
    values.scatter_(1, places(first, count), at_target.narrow(0, first, count));
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
