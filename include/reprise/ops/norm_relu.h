#pragma once

#include <reprise/ops/shared_norm.h>

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

/// The operator of BatchNorm in training; undefined where it is not for x.
torch::Tensor batch_norm_relu(const NormState& norm, const torch::Tensor& x,
                              AfterNorm after);
/// That of GroupNorm.
torch::Tensor group_norm_relu(const torch::Tensor& weight,
                              const torch::Tensor& bias, int64_t groups,
                              double epsilon, const torch::Tensor& x,
                              AfterNorm after);
/// What follows, by LibTorch, written over what the norm gave.
torch::Tensor relu_of_normed(torch::Tensor normed, AfterNorm after);

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
/// Running statistics move as they do there, and statistics over several processes
/// (SharedNormScope) are the norm's own affair. No second derivative.
///
/// `norm`: BatchNorm2d, LibTorch's or of its kind, or GroupNorm.
template <class Norm>
torch::Tensor lean_norm_relu(Norm norm, const torch::Tensor& x,
                             AfterNorm after = AfterNorm::kRelu) {
  const torch::Tensor y = norm->is_training() && !shares_norms()
                              ? batch_norm_relu(norm_state_of(*norm), x, after)
                              : torch::Tensor();
  return y.defined() ? y : relu_of_normed(norm->forward(x), after);
}
inline torch::Tensor lean_norm_relu(torch::nn::GroupNorm norm,
                                    const torch::Tensor& x,
                                    AfterNorm after = AfterNorm::kRelu) {
  const torch::Tensor y =
      group_norm_relu(norm->weight, norm->bias, norm->options.num_groups(),
                      norm->options.eps(), x, after);
  return y.defined() ? y : relu_of_normed(norm->forward(x), after);
}

}  // namespace reprise
