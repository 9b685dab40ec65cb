#pragma once

#include "compat/autocast.h"
#include "train/profile/window_profile.h"

#include <reprise/recompute/execution.h>

#include <torch/types.h>

namespace reprise::detail {

/// What a micro-batch does on the device: forward, recomputation, backward, and the
/// sums of losses and gradients. What it reads and adds to from one call to the
/// next stays where it is, and what changes between windows (the loss's weight with
/// the count and the scale) is read on the device: so a recorded call is right for
/// every later micro-batch of its shape.
class MicroStep {
 public:
  /// The gradients of the parameters `small` are added up together, see SmallGradients.
  MicroStep(torch::Device device, const compat::AutocastState& autocast,
            std::vector<torch::Tensor> small);

  /// The smallest of `parameters`. None on the CPU: there a kernel starts at no cost, and
  /// adding gradients up together gains nothing.
  static std::vector<torch::Tensor> small_of(
      torch::Device device, const std::vector<torch::Tensor>& parameters);

  /// Most that it holds itself, between calls.
  static int64_t held_bytes(torch::Device device);

  /// What the gradient of each micro-batch's loss sum is from now on.
  void set_weight(double weight);

  struct Run {
    WindowProfile* profile = nullptr;
    /// Gradients must be complete as soon as the execution reports them final, not only
    /// at the end. The results are the same bits.
    bool final_on_the_way = false;
    /// Off: the loss is not added to the sum; for a rank that takes part without samples.
    bool counts = true;
  };
  /// Runs `batch`, inputs and targets on the device.
  void run(Execution& execution, const Tensors& batch, const Run& how);
  void run(Execution& execution, const Tensors& batch) {
    run(execution, batch, Run{});
  }

  /// Sum of the losses since the last clear_loss(): a scalar on the device, which
  /// the next micro-batch adds to. Undefined before the first one.
  const torch::Tensor& loss() const { return loss_; }
  void clear_loss();
  /// Goes on from a sum that was saved.
  void set_loss(const torch::Tensor& loss);

 private:
  torch::Device device_;
  compat::AutocastState autocast_;
  std::vector<torch::Tensor> small_;  // parameters
  double weight_ = 0;
  torch::Tensor weight_on_device_;  // in double precision
  torch::Tensor loss_;
};

}  // namespace reprise::detail
