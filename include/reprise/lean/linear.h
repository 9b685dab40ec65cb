#pragma once

#include <torch/types.h>

namespace reprise {

/// How a linear layer's weight lies.
enum class WeightLayout {
  kOutIn,  ///< (out, in), as torch::nn::Linear's
  kInOut,  ///< (in, out)
};

/// x (…, in) times the weight, plus `bias` (out) or nothing: what torch::linear
/// gives, under autocast too.
///
/// Where WeightCopies has a copy of `weight` in autocast's type, it is used, and
/// the backward adds the weight's gradient to `weight.grad()` itself, as one
/// product with the sum in single precision: autograd never sees it, so that
/// torch::autograd::grad() and hooks of the weight find nothing. No second
/// derivative there.
torch::Tensor lean_linear(const torch::Tensor& x, const torch::Tensor& weight,
                          const torch::Tensor& bias = {},
                          WeightLayout layout = WeightLayout::kOutIn);

}  // namespace reprise
