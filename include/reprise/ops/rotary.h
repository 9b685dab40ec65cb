#pragma once

#include <torch/types.h>

namespace reprise::ops {

/// Rotary position embedding: rotates the pairs (x[…, i], x[…, i + D/2]) of x (…, T, D) by
/// the angles whose cosines and sines are `cos` and `sin`, which broadcast to (…, T, D/2).
/// This is the order of Hugging Face's `rotate_half`.
///
/// Computes in the wider of the types of x and cos and returns the type of x, with the order
/// of dimensions in memory that x has. Autocast has no effect.
///
/// The backward rotates by the negative angles and needs neither x nor the result. The graph
/// holds `cos` and `sin`, which must not change before the backward and get no gradient.
/// KeptMeter does not count them if they are (T, D/2): tables that all layers share. With
/// angles per sample, they are saved as activations are. No second derivative. Throws c10::Error if D is odd or the tables do not fit.
torch::Tensor rotary(const torch::Tensor& x, const torch::Tensor& cos,
                     const torch::Tensor& sin);

namespace fallback {

/// The same with products and concatenations of LibTorch. Saves nothing but the tables,
/// once per layer, and needs three more tensors of the size of x while it runs.
torch::Tensor rotary(const torch::Tensor& x, const torch::Tensor& cos,
                     const torch::Tensor& sin);

}  // namespace fallback
}  // namespace reprise::ops
