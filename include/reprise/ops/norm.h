#pragma once

#include <reprise/ops/batch_norm.h>
#include <reprise/ops/pool.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/normalization.h>

#include <optional>

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

struct PostNormResult {
  torch::Tensor stream;   ///< norm(x + branch), the next residual stream
  torch::Tensor rounded;  ///< the same in the type of the next layer's products
};

/// Adds `branch` to x, unless it is undefined, and applies LayerNorm: the order of a
/// post-norm transformer such as BERT, whose residual stream is the output of the norm:
///
///     const auto [y, half] = ops::post_norm(x, attention(x), first_norm);
///     return ops::post_norm(y, feed_forward(half), second_norm, false).stream;
///
/// Uses the kernels of add_norm(), which write both results in one pass and add both
/// gradients in one pass of the backward. `round` false: `rounded` is `stream`, for callers
/// that need no other type. Saves x + branch and two floats per row. No second derivative.
PostNormResult post_norm(const torch::Tensor& x, const torch::Tensor& branch,
                         torch::nn::LayerNorm norm, bool round = true);

/// Activation that follows a norm.
enum class NormActivation { kNone, kRelu, kSilu };

/// What follows a norm, in this order.
struct NormActOptions {
  torch::Tensor residual{};  ///< added to the norm's output if defined
  NormActivation activation = NormActivation::kRelu;
  std::optional<MaxPoolOptions> pool{};  ///< a max pool
  /// The fallback saves less for the pool: it uses ops::max_pool2d() or
  /// ops::relu_max_pool2d(). The kernels always do.
  bool compact_pool = false;
};

}  // namespace reprise::ops

namespace reprise::detail {

/// The CUDA implementations of norm_act() for BatchNorm in training and for GroupNorm.
/// Return an undefined tensor if the kernels do not support the arguments.
torch::Tensor batch_norm_act(const BatchNormState& norm, const torch::Tensor& x,
                             const ops::NormActOptions& options);
torch::Tensor group_norm_act(const torch::nn::GroupNormImpl& norm,
                             const torch::Tensor& x,
                             const ops::NormActOptions& options);

/// `norm.forward(x)` in the type of x. LibTorch's kernels for CUDA require weights of that
/// type.
torch::Tensor forward_group_norm(torch::nn::GroupNormImpl& norm,
                                 const torch::Tensor& x);

/// Applies `options` to the output of a norm with LibTorch, in place if possible.
torch::Tensor activate_normalized(torch::Tensor normalized,
                                  const ops::NormActOptions& options);

}  // namespace reprise::detail

namespace reprise::ops {
namespace fallback {

/// x + branch, and `norm->forward()` of it.
AddNormResult add_norm(const torch::Tensor& x, const torch::Tensor& branch,
                       torch::nn::LayerNorm norm);

/// `norm->forward(x + branch)`, twice the same tensor.
PostNormResult post_norm(const torch::Tensor& x, const torch::Tensor& branch,
                         torch::nn::LayerNorm norm);

/// `norm->forward(x)`, then LibTorch's addition, activation and max pool. Pools before a
/// ReLU, which gives the same result.
template <class Norm>
torch::Tensor norm_act(Norm norm, const torch::Tensor& x,
                       const NormActOptions& options = {}) {
  return detail::activate_normalized(norm->forward(x), options);
}
inline torch::Tensor norm_act(torch::nn::GroupNorm norm, const torch::Tensor& x,
                              const NormActOptions& options = {}) {
  return detail::activate_normalized(detail::forward_group_norm(*norm, x),
                                     options);
}

}  // namespace fallback

/// max_pool(act(norm(x) + residual)) for x (N, C, H, W); by default relu(norm(x)):
///
///     x = ops::norm_act(norm, conv->forward(x));
///     return ops::norm_act(last, x, {.residual = shortcut});
///
/// `norm`: torch::nn::BatchNorm2d, SyncBatchNorm2d or torch::nn::GroupNorm. Updates running
/// statistics as the module does. The result has the type of x: under autocast, a
/// half-precision x is not converted (LibTorch converts it for GroupNorm).
///
/// Uses CUDA kernels if BatchNorm is in training, no SyncBatchNormScope is open, and x is
///   - channels-last in float32, float16 or bfloat16, with a number of channels that is a
///     multiple of 4 in float32 and of 8 otherwise. A residual has the type of x. A pool has
///     a kernel of 2 or 3 and a stride of 2, and follows a ReLU or the norm;
///   - or contiguous in float32, autocast is off, there is no residual, and what follows is
///     a ReLU and at most a 2 × 2 pool.
///
/// LibTorch computes the statistics of a channel (or group) in few blocks of threads, and
/// runs further passes for what follows. Here several blocks share a channel, statistics
/// are merged from parts (no difference of large sums), and one pass does all that follows.
///
///     passes (r read, w write)     fallback                          kernels
///     BatchNorm, ReLU              r rw rw, rrw rr rrw               r rw, rr rrw
///     BatchNorm, residual, ReLU    r rw rrw rw, rrw rr rrw           r rrw, rrrw rrw
///     BatchNorm, ReLU, pool        r rw rw r, w rrw rr rrw           r r, r rw
///
/// Saves x and two floats per statistic; with the pool, one byte per output as well; with
/// a residual and an activation, y (ReLU) or the residual (SiLU), which the neighbouring
/// layers usually save anyway. The gradient of the residual is the masked dy of the first
/// pass. Results equal the fallback's up to rounding, and are reproducible bit for bit. No
/// second derivative.
template <class Norm>
torch::Tensor norm_act(Norm norm, const torch::Tensor& x,
                       const NormActOptions& options = {}) {
  torch::Tensor y;
  if (norm->is_training() && !SyncBatchNormScope::active()) {
    y = detail::batch_norm_act(batch_norm_state(*norm), x, options);
  }
  return y.defined() ? y : fallback::norm_act(norm, x, options);
}
inline torch::Tensor norm_act(torch::nn::GroupNorm norm, const torch::Tensor& x,
                              const NormActOptions& options = {}) {
  const torch::Tensor y = detail::group_norm_act(*norm, x, options);
  return y.defined() ? y : fallback::norm_act(norm, x, options);
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
