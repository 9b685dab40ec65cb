#pragma once

#include <torch/nn/modules/embedding.h>

namespace reprise::ops {

/// Equivalent to `layer->forward(tokens)` for integer tokens of any shape.
///
/// Autograd creates a gradient as large as the table, zero except for the rows that were
/// looked up, and adds all of it. If WeightCopies holds the table, the backward adds only
/// these rows to `weight.grad()`, in a fixed order. The gradient then does not pass through
/// autograd: torch::autograd::grad() and hooks of the weight do not see it. No second
/// derivative.
///
/// The fallback runs if WeightCopies does not hold the table, and for layers with
/// scale_grad_by_freq, max_norm or sparse gradients.
torch::Tensor embedding(const torch::nn::Embedding& layer,
                        const torch::Tensor& tokens);

namespace fallback {

/// `layer->forward(tokens)`.
torch::Tensor embedding(const torch::nn::Embedding& layer,
                        const torch::Tensor& tokens);

}  // namespace fallback
}  // namespace reprise::ops
