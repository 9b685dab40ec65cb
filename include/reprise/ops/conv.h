#pragma once

#include <reprise/ops/pool.h>

#include <torch/nn/modules/conv.h>

#include <optional>

namespace reprise::ops {

/// Equivalent to `conv->forward(x)`, for the first convolution of a network on images
/// (N, C, H, W).
///
/// Uses a CUDA kernel if x is a contiguous float32 tensor with 1 to 4 channels that does
/// not require a gradient, the filters are 2 × 2 or 3 × 3 with stride 1 or 2, and autocast
/// is off. cuDNN assigns the filter gradient of such a layer to one block per sample: for
/// 16 filters and four images of 3584² it takes 900 ms on an H200, where reading the data
/// takes 1 ms. The kernel divides it among all multiprocessors and adds up the partial
/// sums in a fixed order.
///
/// The kernel always computes in float32, even if TF32 is allowed. Results equal the
/// fallback's up to the order of additions, and are reproducible bit for bit. No second
/// derivative.
///
/// Do not use it for later layers: during a forward pass without gradients their inputs do
/// not require a gradient either, so the pass and its recomputation would use different
/// implementations.
torch::Tensor image_conv(torch::nn::Conv2d conv, const torch::Tensor& x);

struct ConvReluOptions {
  std::optional<MaxPoolOptions> pool{};  ///< a max pool after the ReLU
  /// The fallback saves less for the pool: it uses ops::relu_max_pool2d(). The kernels
  /// always do.
  bool compact_pool = false;
};

/// max_pool(relu(conv(x))) for x (N, C, H, W), by default without a pool.
///
/// LibTorch computes the convolution, without its bias. Uses CUDA kernels for what follows
/// if x is channels-last, the result is float32, float16 or bfloat16, the bias is float32,
/// the number of filters is a multiple of 8, and the pool has a kernel of 2 or 3 and a stride
/// of 2:
///
///     passes (r read, w write)     fallback                     kernels
///     bias, ReLU                   rw rw, rrw r                 rw, rrw
///     bias, ReLU, pool             rw rw r, w rrw r             r, w
///
/// Saves x and the result, which the next layer saves as well; with the pool, x and one
/// byte per output. Under autocast the bias is not rounded. Results equal the fallback's up
/// to rounding, and are reproducible bit for bit if the convolution's are. No second
/// derivative.
torch::Tensor conv_relu(torch::nn::Conv2d conv, const torch::Tensor& x,
                        const ConvReluOptions& options = {});

namespace fallback {

/// `conv->forward(x)`.
torch::Tensor image_conv(torch::nn::Conv2d conv, const torch::Tensor& x);

/// `conv->forward(x)`, then LibTorch's ReLU and max pool.
torch::Tensor conv_relu(torch::nn::Conv2d conv, const torch::Tensor& x,
                        const ConvReluOptions& options = {});

}  // namespace fallback
}  // namespace reprise::ops
