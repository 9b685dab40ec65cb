#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/normalization.h>

namespace reprise {

/// What follows a norm: its ReLU, or that and the maximum of each 2 × 2.
enum class AfterNorm {
  kRelu,
  kReluMaxPool,
  /// The same; where LibTorch's operators do it, by lean_relu_max_pool2d().
  kReluLeanMaxPool,
};

/// torch::relu(norm(x)) of x (N, C, H, W), or max_pool2d(relu(norm(x)), 2).
///
/// On CUDA, in single precision, in training, this is one operator. LibTorch computes a
/// channel's (a group's) statistics in one block of threads, which leaves most of a
/// large device idle where images are large and channels few, and passes over the
/// values once more for the ReLU, and again for the maximum. Here blocks share a
/// channel, and one pass does all that follows; the backward has two. Kept are x and
/// two values a statistic; with the maximum, a byte for each output, and neither the
/// norm's output nor the ReLU's ever exists.
///
///     passes over values of x's size    LibTorch              here
///     BatchNorm, ReLU                   r rw rw, rrw rr rrw   r rw, rr rrw
///     BatchNorm, ReLU, maximum          r rw rw r, w rrw rr rrw    r r, r rw
///
/// Equal to LibTorch's up to the order of additions; the same bits in every run.
/// Elsewhere it is LibTorch's own (the maximum before the ReLU, which is the same).
/// Running statistics move as they do there. No second derivative.
torch::Tensor lean_norm_relu(torch::nn::BatchNorm2d norm,
                             const torch::Tensor& x,
                             AfterNorm after = AfterNorm::kRelu);
torch::Tensor lean_norm_relu(torch::nn::GroupNorm norm, const torch::Tensor& x,
                             AfterNorm after = AfterNorm::kRelu);

}  // namespace reprise
