#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <vector>

namespace reprise {

/// Accumulates the gradients of a window, the micro-batches between two
/// optimizer updates. The result is the gradient of the mean loss over the
/// whole window, whatever the sizes of the micro-batches.
///
/// Averaging the mean losses of the micro-batches would weight a micro-batch of
/// 3 tokens like one of 300. Instead, each micro-batch contributes the *sum* of
/// its losses, and every sum is divided by the same number: the count of
/// samples or tokens in the window, which must be known before the first
/// backward.
///
///     Accumulator accumulator(model->parameters());
///     accumulator.begin(tokens_in_window);
///     for (auto& micro : window)
///       accumulator.backward(loss_sum(micro), tokens(micro));
///     accumulator.clip(1.0);
///     accumulator.update(optimizer);   // steps, and clears the gradients
///
/// Calls in the wrong order, counts that are not positive and counts that
/// exceed the window's total throw c10::Error and change nothing. So does a
/// window with parameters of another window that is open, because their
/// gradients would mix. Not thread-safe; several objects may be used by several
/// threads.
class Accumulator {
 public:
  /// Accumulates into the `.grad` of `parameters`. Throws c10::Error if there
  /// are none.
  explicit Accumulator(std::vector<torch::Tensor> parameters);

  /// If `keep` is true, update() zeroes the gradients in place instead of
  /// freeing them, so that they keep their addresses, as CUDA graphs require.
  /// Results are the same, except that a parameter that once had a gradient is
  /// updated in every window. False by default.
  void keep_gradients(bool keep) { keep_ = keep; }

  /// Opens a window of `total_count` samples or tokens over all ranks. Existing
  /// gradients of the parameters are added to, so they should be cleared
  /// before.
  void begin(double total_count);

  /// Opens a window that is shared with other ranks. The micro-batches of this
  /// rank add up to `own_count`, which may be 0; losses are divided by
  /// `total_count`.
  void begin_share(double total_count, double own_count);

  /// Opens a window of which `done_count` samples or tokens are already
  /// accumulated in the gradients.
  void resume(double total_count, double done_count);

  /// Runs the backward pass of `loss_sum` / total_count for a micro-batch of
  /// `count` samples or tokens. `loss_sum` must have one element.
  void backward(const torch::Tensor& loss_sum, double count);

  /// Adds `count` to the window for a caller that runs the backward pass
  /// itself. Returns the gradient of the loss sum to use, 1 / total_count.
  double weigh(double count);

  /// Returns whether the counts add up to the window's total, or to this rank's
  /// share of it.
  bool complete() const;
  double total_count() const { return total_; }  ///< 0 if no window is open
  double done_count() const { return done_; }

  /// Returns the 2-norm of all gradients together, as a scalar on their device.
  /// Does not synchronize with the device. The window must be complete.
  torch::Tensor norm() const;

  /// Scales the gradients so that their norm is at most `max_norm`, and returns
  /// the norm before clipping. Does not synchronize with the device. The window
  /// must be complete.
  torch::Tensor clip(double max_norm);

  /// Calls `optimizer.step()`, clears the gradients and closes the window,
  /// which must be complete.
  void update(torch::optim::Optimizer& optimizer);

  /// Overload that calls `step` instead of an optimizer.
  void update(const std::function<void()>& step);

  /// Closes the window without an update and frees its gradients, even if they
  /// are kept (see keep_gradients()).
  void abandon();

 private:
  void check_open(const char* call) const;
  void check_complete(const char* call) const;
  void close();
  void drop_gradients();

  std::vector<torch::Tensor> parameters_;
  double total_ = 0;  // 0 if no window is open
  double own_ = 0;    // this rank's share of total_
  double done_ = 0;
  bool keep_ = false;
  std::shared_ptr<void> claim_;  // of the gradients while a window is open
};

/// Returns the 2-norm of all gradients of `parameters` together, as a scalar on
/// the gradients' device in at least single precision. Parameters without a
/// gradient count as zero.
torch::Tensor gradient_norm(const std::vector<torch::Tensor>& parameters);

/// Scales the gradients of `parameters` so that their 2-norm, given as `norm`,
/// becomes at most `max_norm`.
void clip_gradients(const std::vector<torch::Tensor>& parameters,
                    const torch::Tensor& norm, double max_norm);

}  // namespace reprise
