#pragma once

#include <torch/nn/modules/embedding.h>

namespace reprise {

/// What `layer` gives for `tokens`, integers of any shape.
///
/// Autograd makes a gradient as large as the table, zero but for the rows that were
/// looked up, and adds all of it. Where WeightCopies knows the table, the backward adds
/// the rows to `weight.grad()` themselves, in an order that is always the same: autograd
/// never sees them, as with lean_linear(). Not for layers that scale by frequency, bound
/// norms or have sparse gradients; those stay LibTorch's. No second derivative.
torch::Tensor lean_embedding(const torch::nn::Embedding& layer,
                             const torch::Tensor& tokens);

}  // namespace reprise
