#pragma once

#include "train/step/train_setup.h"
#include "train/step/window_exchange.h"

#include <reprise/accumulate/accumulator.h>
#include <reprise/train/scaler.h>

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace reprise::detail {

/// Owns the gradients of a training's parameters from the first backward of a
/// window to its update.
///
/// Invariants
/// 1. Between windows, no parameter has a gradient, or with keep_in_place() all
///    have a gradient of zeros at the same address.
/// 2. Within a window, `.grad` is the sum over the micro-batches so far of the
///    gradient of loss sum × scale / total count. Only the backward of MicroStep
///    adds to it, and the sums are complete when it returns.
/// 3. In that backward, each parameter has one writer: the operators of a weight
///    with a copy (WeightCopies::weights()), SmallGradients for the smallest of
///    the others, and autograd for the rest, with TiedGradients if several
///    stages use it. StepRunner owns the copies and assigns the writers.
/// 4. After WindowExchange::finish(), `.grad` is the sum over all ranks. With a
///    sharded optimizer, only the shards have a `.grad`.
/// 5. make_ready() divides by the scale and clips, once. update() then clears.
/// 6. With BackwardUpdate, the backward updates each parameter and frees its gradient as soon
///    as that is final; make_ready() is not called.
///
/// Tested by tests/train/loop/trainer_test.cpp and tests/train/step/oom_retry_test.cpp.
class Gradients {
 public:
  Gradients(const TrainSetup& setup, Ranks& ranks, WindowExchange& exchange);

  /// See Accumulator::keep_gradients(); CUDA graphs need it.
  void keep_in_place(bool keep) { accumulator_.keep_gradients(keep); }

  /// Opens a window of `total_count` samples or tokens over all ranks, of which
  /// this one has `own_count`.
  void begin(double total_count, double own_count) {
    accumulator_.begin_share(total_count, own_count);
  }
  /// Opens a window of which the gradients already contain `done_count`.
  void resume(double total_count, double done_count) {
    accumulator_.resume(total_count, done_count);
  }
  /// Adds a micro-batch of `count` samples or tokens to the window and returns
  /// the weight of its loss sum.
  double weigh(double count) {
    return accumulator_.weigh(count) * scaler_.scale();
  }
  bool complete() const { return accumulator_.complete(); }
  double done_count() const { return accumulator_.done_count(); }

  /// Drops the window and its gradients.
  void abandon();

  struct Ready {
    bool finite = true;  ///< false: the update must be skipped
    torch::Tensor norm;  ///< before clipping; undefined without clipping
  };
  /// Unscales the gradients, calls `hook` unless they overflowed, and clips them. Each
  /// part that allocates is run through `guarded`.
  Ready make_ready(
      const std::function<void(const std::function<void()>&)>& guarded,
      const std::function<void()>& hook);

  /// Calls `step` if `finite`, clears the gradients, closes the window and
  /// adjusts the loss scale.
  void update(bool finite, const std::function<void()>& step);

  /// Share of denormal numbers among the gradient values; 0 if not on the CPU.
  double denormal_share() const;

  GradScaler& scaler() { return scaler_; }
  const GradScaler& scaler() const { return scaler_; }

 private:
  HostParameters* host_;  // may be null
  double clip_ = 0;
  bool fp16_ = false;
  torch::Device device_;
  std::vector<torch::Tensor> parameters_;
  Ranks& ranks_;
  WindowExchange& exchange_;
  Accumulator accumulator_;
  GradScaler scaler_;
};

}  // namespace reprise::detail
