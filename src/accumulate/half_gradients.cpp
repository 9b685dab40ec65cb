#include "accumulate/half_gradients.h"

#include "ops/stochastic_add.h"

#include <utility>

namespace reprise::detail {
namespace {

using torch::Tensor;

const void* key_of(const Tensor& parameter) {
  return parameter.unsafeGetTensorImpl();
}

Tensor zeros_like_in_half(const Tensor& tensor) {
  return torch::zeros_like(tensor, tensor.options().dtype(torch::kBFloat16));
}

}  // namespace

HalfGradients::HalfGradients(ByStage parameters)
    : parameters_(std::move(parameters)) {}

void HalfGradients::begin(uint64_t seed, bool last) {
  seed_ = seed;
  last_ = last;
  stages_left_ = parameters_.size();
  next_ = 0;
}

void HalfGradients::final_from(int stage) {
  const torch::NoGradGuard no_grad;
  while (stages_left_ > static_cast<size_t>(stage)) {
    const size_t at = stages_left_ - 1;
    const auto& list = parameters_[at];
    for (; next_ < list.size(); ++next_) {
      if (last_) {
        restore(list[next_]);
      } else {
        add(list[next_], seed_ + (static_cast<uint64_t>(at) << 32 | next_));
      }
    }
    next_ = 0;
    stages_left_ = at;
  }
}

void HalfGradients::add(const Tensor& parameter, uint64_t seed) {
  Tensor& gradient = Tensor(parameter).mutable_grad();
  if (!gradient.defined()) return;
  Tensor& sum = sums_[key_of(parameter)];
  if (gradient.scalar_type() != torch::kFloat) {  // exact sums
    sum = sum.defined() ? sum.add_(gradient) : gradient;
    gradient.reset();
    return;
  }
  const bool dense =
      !gradient.is_sparse() && gradient.is_non_overlapping_and_dense();
  if (!sum.defined()) sum = zeros_like_in_half(dense ? gradient : parameter);
  if (!dense || sum.strides() != gradient.strides()) {
    gradient =
        torch::empty_like(sum, sum.options().dtype(torch::kFloat))
            .copy_(gradient.is_sparse() ? gradient.to_dense() : gradient);
  }
  add_stochastically(sum, gradient, seed);
  gradient.reset();
}

void HalfGradients::restore(const Tensor& parameter) {
  const auto found = sums_.find(key_of(parameter));
  if (found == sums_.end()) return;
  Tensor& gradient = Tensor(parameter).mutable_grad();
  if (gradient.defined()) {
    gradient.add_(found->second);
  } else {
    gradient = found->second.to(parameter.scalar_type());
  }
  sums_.erase(found);
}

Tensor HalfGradients::sum(const Tensor& parameter) const {
  const auto found = sums_.find(key_of(parameter));
  return found == sums_.end() ? Tensor() : found->second;
}

void HalfGradients::set_sum(const Tensor& parameter, Tensor sum) {
  sums_[key_of(parameter)] = std::move(sum);
}

}  // namespace reprise::detail
