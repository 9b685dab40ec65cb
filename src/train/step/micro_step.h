#pragma once

#include "compat/autocast.h"
#include "train/profile/window_profile.h"

#include <reprise/ops/weight_copies.h>
#include <reprise/recompute/execution.h>

#include <torch/types.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace reprise::detail {

/// The work of a micro-batch on the device: forward, recomputation, backward,
/// and the sums of losses and gradients. Tensors that are used across calls
/// keep their addresses, and values that change between windows (the weight of
/// the loss) are read from device memory. A call captured in a CUDA graph is
/// therefore valid for all later micro-batches of the same shape.
class MicroStep {
 public:
  /// The gradients of the parameters `small` are accumulated together; see
  /// SmallGradients.
  MicroStep(torch::Device device, const compat::AutocastState& autocast,
            std::vector<torch::Tensor> small);

  /// Returns the smallest of `parameters`, whose gradients should be
  /// accumulated together, without those that operators of `copies` add
  /// themselves. `copies` may be null. Empty on the CPU, where kernels have no
  /// launch overhead to save.
  static std::vector<torch::Tensor> small_of(
      torch::Device device, const std::vector<torch::Tensor>& parameters,
      const WeightCopies* copies);

  /// Replaces the parameters whose gradients are accumulated together, because
  /// weight copies were created or freed.
  void set_small(std::vector<torch::Tensor> small) {
    small_ = std::move(small);
  }

  /// Maximum device memory that a MicroStep holds between calls.
  static int64_t held_bytes(torch::Device device);

  /// Sets the gradient of the loss sum for the following micro-batches.
  void set_weight(double weight);

  struct Run {
    WindowProfile* profile = nullptr;
    /// Gradients must be complete as soon as the execution reports them final,
    /// not only at the end. The results are bit-identical.
    bool final_on_the_way = false;
    /// If false, the loss is not added to the sum; for a rank that takes part
    /// without samples.
    bool counts = true;
    /// Called if an allocation fails in the backward, with its message. Returns whether it
    /// has completed the backward; otherwise the failure propagates.
    std::function<bool(const std::string& failure)> recover{};
  };
  /// Runs a micro-batch; `batch` has its inputs and targets, on the device.
  void run(Execution& execution, const Tensors& batch, const Run& how);
  void run(Execution& execution, const Tensors& batch) {
    run(execution, batch, Run{});
  }

  /// Sum of the losses since the last clear_loss(): a scalar on the device that
  /// the next micro-batch adds to. Undefined before the first micro-batch.
  const torch::Tensor& loss() const { return loss_; }
  void clear_loss();
  /// Restores a saved sum of losses.
  void set_loss(const torch::Tensor& loss);

 private:
  static void run_backward(Execution& execution, Tensors gradients,
                           const Run& how);

  torch::Device device_;
  compat::AutocastState autocast_;
  std::vector<torch::Tensor> small_;  // parameters
  double weight_ = 0;
  torch::Tensor weight_on_device_;  // in double precision
  torch::Tensor loss_;
};

}  // namespace reprise::detail
