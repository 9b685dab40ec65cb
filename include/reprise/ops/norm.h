#pragma once

#include <reprise/ops/batch_norm.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/normalization.h>

namespace reprise::ops {

struct AddNormResult {
  torch::Tensor sum;         ///< x + branch
  torch::Tensor normalized;  ///< norm(sum)
};

/// Adds `branch` to the residual stream x, unless it is undefined, and applies LayerNorm
/// over the last dimension, as before each layer of a pre-norm transformer:
///
///     const auto [r, n] = ops::add_norm(x, {}, first_norm);
///     const auto [s, m] = ops::add_norm(r, attention(n), second_norm);
///     return s + feed_forward(m);
///
/// Uses a CUDA kernel if x is contiguous, float32 or half precision, and has a number of
/// columns that is a multiple of 4 and at most 8192: one pass over the values forward, one
/// backward, which also adds the gradient that reaches `sum` from other uses, and one over
/// partial sums for the gradients of weight and bias. Under autocast `normalized` then has
/// the type that autocast selects. Saves `sum` and two floats per row. Results equal the fallback's up to the order of
/// additions, and are reproducible bit for bit. No second derivative.
AddNormResult add_norm(const torch::Tensor& x, const torch::Tensor& branch,
                       torch::nn::LayerNorm norm);

/// What follows a norm.
enum class NormActivation {
  kRelu,         ///< ReLU
  kReluMaxPool,  ///< ReLU and a 2 × 2 max pool
  /// The same, saving less: the fallback uses ops::relu_max_pool2d().
  kReluCompactMaxPool,
};

}  // namespace reprise::ops

namespace reprise::detail {

/// The CUDA implementation of norm_relu() for BatchNorm in training and for GroupNorm.
/// Returns an undefined tensor if the kernels do not support the arguments.
torch::Tensor batch_norm_relu(const BatchNormState& norm,
                              const torch::Tensor& x,
                              ops::NormActivation activation);
torch::Tensor group_norm_relu(const torch::nn::GroupNormImpl& norm,
                              const torch::Tensor& x,
                              ops::NormActivation activation);

/// Applies the activation to the output of a norm, in place if possible.
torch::Tensor activate_normalized(torch::Tensor normalized,
                                  ops::NormActivation activation);

}  // namespace reprise::detail

namespace reprise::ops {
namespace fallback {

/// x + branch, and `norm->forward()` of it.
AddNormResult add_norm(const torch::Tensor& x, const torch::Tensor& branch,
                       torch::nn::LayerNorm norm);

/// `norm->forward(x)`, then LibTorch's ReLU and max pool. Pools before the ReLU, which
/// gives the same result.
template <class Norm>
torch::Tensor norm_relu(Norm norm, const torch::Tensor& x,
                        NormActivation activation = NormActivation::kRelu) {
  return detail::activate_normalized(norm->forward(x), activation);
}

}  // namespace fallback

/// torch::relu(norm(x)) for x (N, C, H, W), or max_pool2d(relu(norm(x)), 2). `norm`:
/// torch::nn::BatchNorm2d, SyncBatchNorm2d or torch::nn::GroupNorm. Updates running
/// statistics as the module does.
///
/// Uses CUDA kernels if x is contiguous and float32, autocast is off, BatchNorm is in
/// training and no SyncBatchNormScope is open. LibTorch computes the statistics of a
/// channel (or group) in one block of threads, which leaves most of a large GPU idle if
/// images are large and channels few, and runs further passes for the ReLU and the pool.
/// Here several blocks share a channel, and one pass does all that follows. Saves x and two
/// floats per statistic; with the pool, one byte per output as well.
///
///     passes (r read, w write)     fallback                    kernels
///     BatchNorm, ReLU              r rw rw, rrw rr rrw         r rw, rr rrw
///     BatchNorm, ReLU, pool        r rw rw r, w rrw rr rrw     r r, r rw
///
/// Results equal the fallback's up to the order of additions, and are reproducible bit for
/// bit. No second derivative.
template <class Norm>
torch::Tensor norm_relu(Norm norm, const torch::Tensor& x,
                        NormActivation activation = NormActivation::kRelu) {
  torch::Tensor y;
  if (norm->is_training() && !SyncBatchNormScope::active()) {
    y = detail::batch_norm_relu(batch_norm_state(*norm), x, activation);
  }
  return y.defined() ? y : fallback::norm_relu(norm, x, activation);
}
inline torch::Tensor norm_relu(
    torch::nn::GroupNorm norm, const torch::Tensor& x,
    NormActivation activation = NormActivation::kRelu) {
  const torch::Tensor y = detail::group_norm_relu(*norm, x, activation);
  return y.defined() ? y : fallback::norm_relu(norm, x, activation);
}

/// Root-mean-square norm over the last dimension, as before each layer of a Llama:
/// x / √(mean(x²) + eps), times `weight`. x (…, D), weight (D).
///
/// Statistics are float32 if x is float16 or bfloat16, and have the type of x otherwise. The
/// normalized values are rounded to the type of x before the product, so that the result
/// has the type to which LibTorch promotes x and weight. Autocast has no effect.
///
/// Uses the CUDA kernels of add_norm() for the arguments that they support. Saves x and one
/// value per row. LibTorch's operators also save the normalized values, and a float32 copy
/// of a half-precision x. Results equal the fallback's up to rounding, and
/// are reproducible bit for bit. No second derivative. Throws c10::Error if the shapes do
/// not match or `eps` is negative.
torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight,
                       double eps);

/// Adds `branch` to the residual stream x, unless it is undefined, and applies rms_norm():
/// add_norm() for the RMS norm, with the same kernels. Saves `sum` and one float per row.
/// If the kernels do not support the arguments, `normalized` has the type that rms_norm()
/// returns, under autocast too. Throws c10::Error as rms_norm() does.
AddNormResult add_rms_norm(const torch::Tensor& x, const torch::Tensor& branch,
                           const torch::Tensor& weight, double eps);

namespace fallback {

/// The formula above in LibTorch's operators.
torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight,
                       double eps);

/// x + branch, and fallback::rms_norm() of it.
AddNormResult add_rms_norm(const torch::Tensor& x, const torch::Tensor& branch,
                           const torch::Tensor& weight, double eps);

}  // namespace fallback

}  // namespace reprise::ops
