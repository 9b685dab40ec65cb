#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <functional>
#include <vector>

namespace reprise {

/// Adds up the gradients of a window of micro-batches so that the sum is the
/// gradient of the whole batch, whatever the sizes of the micro-batches.
///
/// A mean of means weighs a micro-batch of 3 tokens like one of 300. Here each
/// micro-batch gives the *sum* of its losses, and every sum is divided by the
/// same number: the count of samples or tokens of the whole window, known
/// before the first backward.
///
///     Accumulator accumulator(model->parameters());
///     accumulator.begin(tokens_in_window);
///     for (auto& micro : window)
///       accumulator.backward(loss_sum(micro), tokens(micro));
///     accumulator.clip(1.0);
///     accumulator.update(optimizer);   // steps, and clears the gradients
///
/// A wrong order of calls, a count that is not positive, or counts that do not
/// add up to the window's throw c10::Error and change nothing. Not thread-safe.
class Accumulator {
 public:
  explicit Accumulator(std::vector<torch::Tensor> parameters);

  /// With `keep`, update() sets the gradients to zero where they are instead of to
  /// none, so that they have the same memory in every window: what a CUDA graph
  /// needs. Results are the same, but a parameter that had a gradient once is
  /// updated in every window. Off by default.
  void keep_gradients(bool keep) { keep_ = keep; }

  /// Opens a window of `total_count` samples or tokens, over all ranks. What
  /// the parameters' gradients hold already would be added to: clear them
  /// first.
  void begin(double total_count);

  /// The same where other ranks have the rest: all is divided by `total_count`, and
  /// the micro-batches here add up to `own_count`, which may be 0.
  void begin_share(double total_count, double own_count);

  /// Opens a window of which `done_count` is in the gradients already.
  void resume(double total_count, double done_count);

  /// Backward of `loss_sum` / total_count, for a micro-batch of `count`.
  void backward(const torch::Tensor& loss_sum, double count);

  /// The same for those who run the backward themselves: notes `count` and
  /// returns what the gradient of the loss sum must be, 1 / total_count.
  double weigh(double count);

  /// True once the counts add up to the window's total, or to this rank's own.
  bool complete() const;
  double total_count() const { return total_; }
  double done_count() const { return done_; }

  /// 2-norm of the whole gradient, a scalar on its device; no synchronisation.
  torch::Tensor norm() const;

  /// Scales the gradient so that its norm is at most `max_norm`; once, when the
  /// window is complete. Returns the norm before; no synchronisation.
  torch::Tensor clip(double max_norm);

  /// Steps the optimizer, clears the gradients and closes the window.
  void update(torch::optim::Optimizer& optimizer);

  /// The same with any other update from the parameters' gradients.
  void update(const std::function<void()>& step);

  /// Closes the window without an update and drops its gradients, kept ones too.
  void abandon();

 private:
  void check_open(const char* call) const;
  void check_complete(const char* call) const;
  void close();
  void drop_gradients();

  std::vector<torch::Tensor> parameters_;
  double total_ = 0;  // 0: no window is open
  double own_ = 0;    // of it, here
  double done_ = 0;
  bool keep_ = false;
};

/// 2-norm of all gradients of `parameters` together; those without one count
/// zero. A scalar on the gradients' device, in at least single precision.
torch::Tensor gradient_norm(const std::vector<torch::Tensor>& parameters);

/// Scales the gradients so that `norm`, their norm, becomes at most `max_norm`.
void clip_gradients(const std::vector<torch::Tensor>& parameters,
                    const torch::Tensor& norm, double max_norm);

}  // namespace reprise
