#pragma once

#include <torch/types.h>

namespace reprise::ops {

/// Equivalent to torch::cat({a, b + bias}, 1) for images (N, C, H, W), forward and backward:
/// a skip connection is joined with the output of a layer whose bias is added on the way.
/// Without a bias, results are bit-identical.
///
/// On a GPU with kernels and channels-last images, one pass over memory forward and one
/// backward, which also leaves both gradients contiguous. The fallback runs if a and b differ
/// in type, if the numbers of channels are not multiples of 8 (float32: 4), or elsewhere.
/// Saves nothing for the backward. No second derivative with kernels. Throws c10::Error on
/// shapes that differ in more than their channels.
torch::Tensor concat_channels(const torch::Tensor& a, const torch::Tensor& b,
                              const torch::Tensor& bias = {});

namespace fallback {

/// torch::cat({a, b + bias}, 1).
torch::Tensor concat_channels(const torch::Tensor& a, const torch::Tensor& b,
                              const torch::Tensor& bias = {});

}  // namespace fallback
}  // namespace reprise::ops
