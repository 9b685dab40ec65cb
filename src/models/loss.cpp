#include "models/loss.h"

#include <reprise/ops/linear_cross_entropy.h>

#include <torch/nn/functional/loss.h>

namespace reprise::detail {

namespace F = torch::nn::functional;
using torch::Tensor;

Tensors LossImpl::forward(const Tensor& scores, const Tensor& targets) {
  const bool pixels = task_ == Task::kPixels;
  // A sample's loss is the mean over its pixels.
  const double parts =
      pixels ? static_cast<double>(targets.size(1) * targets.size(2)) : 1;
  Tensor loss =
      F::cross_entropy(scores.to(torch::kFloat), targets,
                       F::CrossEntropyFuncOptions().reduction(torch::kSum));
  if (pixels) loss = loss / parts;
  if (is_training()) return {loss};
  // No class is -100, so ignored targets are never right.
  const Tensor right = scores.detach().argmax(1).eq(targets).sum();
  return {loss, right.to(torch::kDouble) / parts};
}

Tensors LossImpl::forward_in_chunks(const Tensor& hidden, const Tensor& weight,
                                    const Tensor& targets) {
  LinearCrossEntropyOptions options;
  options.loss_type = torch::kFloat;
  options.count_right = !is_training();
  const auto [loss, right] =
      linear_cross_entropy(hidden, weight, {}, targets, options);
  if (is_training()) return {loss};
  return {loss, right.to(torch::kDouble)};
}

}  // namespace reprise::detail
