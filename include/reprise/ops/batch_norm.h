#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/types.h>

#include <memory>
#include <optional>

namespace reprise {

/// Processes that share the statistics of BatchNorm.
class BatchNormPeers {
 public:
  virtual ~BatchNormPeers() = default;

  /// All-gather: returns the `own` (n) of every peer, float64 on the CPU, as (peers, n).
  /// Rows have the same order on all peers. All peers make the same sequence of calls, one
  /// at a time. Exceptions propagate out of the forward or the backward.
  virtual torch::Tensor gather(const torch::Tensor& own) = 0;
};

/// While a scope is open, ops::sync_batch_norm() computes mean and variance over the
/// batches of all peers. One scope per process at a time; forwards may run on any thread.
class SyncBatchNormScope {
 public:
  /// `peers` null: this process only, with the same operator. `counts` false: the values of
  /// this process are excluded from the statistics and get no gradient through them; for a
  /// peer that has no samples but must take part in the calls. Throws c10::Error if a scope
  /// is already open.
  explicit SyncBatchNormScope(std::shared_ptr<BatchNormPeers> peers,
                              bool counts = true);
  ~SyncBatchNormScope();
  SyncBatchNormScope(const SyncBatchNormScope&) = delete;
  SyncBatchNormScope& operator=(const SyncBatchNormScope&) = delete;

  /// Whether a scope is open.
  static bool active();
};

/// Parameters and buffers of a BatchNorm module. Tensors are (C), the counter is a scalar.
struct BatchNormState {
  torch::Tensor weight, bias;
  torch::Tensor running_mean, running_var;  ///< undefined if not tracked
  torch::Tensor num_batches_tracked;
  std::optional<double> momentum;  ///< none: cumulative mean over all batches
  double eps = 1e-5;
};

/// State of a module with the members of torch::nn::BatchNorm2d.
template <class Norm>
BatchNormState batch_norm_state(const Norm& norm) {
  BatchNormState state{norm.weight,
                       norm.bias,
                       norm.running_mean,
                       norm.running_var,
                       norm.num_batches_tracked,
                       std::nullopt,
                       norm.options.eps()};
  if (norm.options.momentum().has_value()) {
    state.momentum = *norm.options.momentum();
  }
  return state;
}

namespace ops {

/// BatchNorm of x (N, C, …) in training, with mean and variance over the batches of all
/// peers of the open SyncBatchNormScope. Updates the running statistics with them.
///
/// The forward gathers once, 2 C + 1 numbers, and the backward once, 2 C numbers. Batch
/// sizes may differ between peers and may be zero. Statistics are merged in float64 in the
/// order of the peers (Chan et al. 1983, "Algorithms for computing the sample variance"):
/// all peers get the same bits, and so does a recomputation. The gradients of weight and
/// bias are the share of this process. Saves what LibTorch's batch_norm saves. Throws
/// c10::Error if no scope is open, on mismatched shapes, and if all peers together have one
/// value per channel. No second derivative.
torch::Tensor sync_batch_norm(const BatchNormState& norm,
                              const torch::Tensor& x);

}  // namespace ops

/// torch::nn::BatchNorm2d that uses ops::sync_batch_norm() in training while a
/// SyncBatchNormScope is open. A class of its own, since parts of LibTorch's class are not
/// exported and it cannot be derived from.
class SyncBatchNorm2dImpl
    : public torch::nn::NormImplBase<2, SyncBatchNorm2dImpl,
                                     torch::nn::BatchNormOptions> {
 public:
  /// `options`: the number of channels, or torch::nn::BatchNormOptions.
  explicit SyncBatchNorm2dImpl(const torch::nn::BatchNormOptions& options)
      : NormImplBase(options) {}

  /// x (N, C, H, W). Throws c10::Error on other shapes, and in training on one value per
  /// channel.
  torch::Tensor forward(const torch::Tensor& x);

 private:
  void _check_input_dim(const torch::Tensor& x) override;
};
TORCH_MODULE(SyncBatchNorm2d);

}  // namespace reprise
