#include "models/loss.h"

#include <reprise/ops/loss.h>

#include <torch/nn/functional/loss.h>

namespace reprise::detail {

namespace F = torch::nn::functional;
using torch::Tensor;

Tensors LossImpl::forward(const Tensor& scores, const Tensor& targets) {
  const bool pixels = task_ == Task::kPixels;
  // The loss of a sample is the mean over its pixels.
  const double values_per_sample =
      pixels ? static_cast<double>(targets.size(1) * targets.size(2)) : 1;
  Tensor loss =
      F::cross_entropy(scores.to(torch::kFloat), targets,
                       F::CrossEntropyFuncOptions().reduction(torch::kSum));
  if (pixels) loss = loss / values_per_sample;
  if (is_training()) return {loss};
  // No class equals -100, so ignored targets are not counted.
  const Tensor correct = scores.detach().argmax(1).eq(targets).sum();
  return {loss, correct.to(torch::kDouble) / values_per_sample};
}

Tensors LossImpl::forward_in_chunks(const Tensor& hidden, const Tensor& weight,
                                    const Tensor& targets, bool recompute) {
  ops::LinearCrossEntropyOptions options;
  options.loss_type = torch::kFloat;
  if (recompute) options.gradients_in_forward = false;
  options.count_correct = !is_training();
  const auto [loss, correct] =
      ops::linear_cross_entropy(hidden, weight, {}, targets, options);
  if (is_training()) return {loss};
  return {loss, correct.to(torch::kDouble)};
}

}  // namespace reprise::detail
