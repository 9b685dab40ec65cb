#pragma once

#include <torch/types.h>

#include <array>
#include <vector>

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
/// torch::autograd::grad() and hooks of the weight find nothing. Likewise a bias
/// that has a copy. No second derivative there.
torch::Tensor lean_linear(const torch::Tensor& x, const torch::Tensor& weight,
                          const torch::Tensor& bias = {},
                          WeightLayout layout = WeightLayout::kOutIn);

/// Makes matrices of as many columns, or vectors, lie one after the other in memory,
/// so that one product can take them for one matrix; their values stay.
void pack_contiguous(const std::vector<torch::Tensor>& parameters);

/// Three layers of one input as one product: x (…, in) gives (…, out₀ + out₁ + out₂).
/// Only where the weights, of kOutIn, lie together, their biases likewise, and
/// WeightCopies has copies of them; undefined elsewhere. Gradients as lean_linear()'s;
/// new ones lie together too.
torch::Tensor qkv_linear(const torch::Tensor& x,
                         const std::array<torch::Tensor, 3>& weights,
                         const std::array<torch::Tensor, 3>& biases);

}  // namespace reprise
