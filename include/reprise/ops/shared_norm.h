#pragma once

#include <torch/types.h>

#include <memory>
#include <optional>

namespace reprise {

/// Those who take the statistics of BatchNorm together.
class NormPeers {
 public:
  virtual ~NormPeers() = default;

  /// The `own` (n) of all, in double precision on the host, as (peers, n) in an order
  /// that is the same everywhere. All peers make the same calls, from one thread at a
  /// time each. What it throws ends the forward or the backward.
  virtual torch::Tensor gather(const torch::Tensor& own) = 0;
};

/// While it lives, shared_batch_norm() takes mean and variance over what all peers
/// have at hand. One at a time in a process; forwards on any thread.
class SharedNormScope {
 public:
  /// `peers` null: this process alone, by the same operator. With `counts` off this
  /// one's values are no part of the statistics, and no gradient flows through them:
  /// for a peer that has nothing and must make the calls all the same.
  explicit SharedNormScope(std::shared_ptr<NormPeers> peers,
                           bool counts = true);
  ~SharedNormScope();
  SharedNormScope(const SharedNormScope&) = delete;
  SharedNormScope& operator=(const SharedNormScope&) = delete;
};

/// What a norm has; all but the optional number are tensors of (C) and a counter.
struct NormState {
  torch::Tensor weight, bias;
  torch::Tensor running_mean, running_var;  ///< undefined: not tracked
  torch::Tensor num_batches_tracked;
  std::optional<double> momentum;  ///< nothing: the mean of all batches
  double eps = 1e-5;
};

/// What BatchNorm in training gives for x (N, C, …), with the mean and the variance of
/// all peers' values; the running statistics move by these as well. Undefined where no
/// scope is open: then it is the norm's own affair.
///
/// A forward and a backward gather once each: 2 C + 1 and 2 C numbers. Counts may
/// differ and be nothing on some; throws c10::Error where all together have one value
/// a channel. Statistics are combined in double precision (Chan et al. 1983, "Algorithms
/// for computing the sample variance"), in the peers' order: all have the same bits,
/// and a recomputation has them again. The gradients of weight and bias are this
/// process's part. Keeps what LibTorch's operator keeps.
torch::Tensor shared_batch_norm(const NormState& norm, const torch::Tensor& x);

/// Whether a scope is open.
bool shares_norms();

/// Of a module of LibTorch's kind.
template <class Norm>
NormState norm_state_of(const Norm& norm) {
  NormState state{norm.weight,
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

/// The same of such a module; undefined also where it is not training.
template <class Norm>
torch::Tensor shared_batch_norm(const Norm& norm, const torch::Tensor& x) {
  if (!norm.is_training()) return {};
  return shared_batch_norm(norm_state_of(norm), x);
}

}  // namespace reprise
