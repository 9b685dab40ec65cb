#pragma once

#include "compat/work_lane.h"
#include "train/optim/partial_optimizer.h"
#include "train/step/train_setup.h"

#include <reprise/recompute/execution.h>
#include <reprise/train/optimizer.h>

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace reprise::detail {

/// Returns the bytes of the parameters' gradients by the first stage of the chain that uses
/// them, whose backward makes them final.
std::vector<int64_t> final_gradient_bytes(const TrainSetup& setup);

/// Returns the parameters that require a gradient, by the first stage that uses them.
std::vector<std::vector<torch::Tensor>> trained_by_first_stage(
    const Model& model);

/// Updates parameters in the backward of a window that has one micro-batch: each as soon as
/// its gradient is final, and frees the gradient. The weights of a stage are not used after
/// its backward, neither by recomputations, which precede it, nor by other stages, since a
/// parameter counts for the first stage that uses it.
///
///     update.begin(lr);
///     forward and backward with the ExecutionOptions of attach()
///     update.finish();
///
/// Once a parameter has been updated, the micro-batch cannot be repeated; see changed().
/// Tested by tests/train/step/backward_update_test.cpp.
class BackwardUpdate {
 public:
  /// Keeps references to both. Throws c10::Error if the optimizer cannot update single
  /// parameters.
  BackwardUpdate(const TrainSetup& setup, Optimizer& optimizer);

  /// Whether `optimizer` can update single parameters.
  static bool supports(const Optimizer& optimizer);

  /// Stages at which the autograd graph is cut, in descending order.
  const std::vector<int>& cuts() const { return cuts_; }
  /// Parameters by the first stage that uses them.
  const std::vector<std::vector<torch::Tensor>>& by_stage() const {
    return by_stage_;
  }

  /// Adds the callback that updates parameters, and the stages at which the autograd graph is
  /// cut so that gradients become final early.
  void attach(ExecutionOptions& options);

  /// Begins an update with learning rate `lr`. `count_denormals`: for denormal_share().
  void begin(double lr, bool count_denormals);

  /// Runs updates beside the backward, for state in host memory, since they wait for copies
  /// then. finish() waits for them.
  void set_beside(bool beside);
  /// Null: updates are part of the backward's work.
  compat::WorkLane* lane() { return lane_.get(); }

  /// Makes the following micro-batches add to the gradients, until begin().
  void suspend() { active_ = false; }

  /// Encloses the capture of a micro-batch into a CUDA graph, or its replay by a test.
  class Captured {
   public:
    explicit Captured(BackwardUpdate* update) : update_(update) {
      if (update_ != nullptr) update_->captured_ = true;
    }
    ~Captured() {
      if (update_ != nullptr) update_->captured_ = false;
    }
    Captured(const Captured&) = delete;
    Captured& operator=(const Captured&) = delete;

   private:
    BackwardUpdate* update_;
  };

  /// Called at the end of a capture. Throws c10::Error if another CUDA graph updates other
  /// parameters.
  void check_recorded() const;
  /// Drops what a failed capture noted: it has not changed any values.
  void forget_captured();
  /// Notes the replay of a CUDA graph, which changed the parameters.
  void note_replay();

  /// Ends the update after a complete micro-batch.
  void finish();

  /// Whether parameters have been changed since begin() and the update is not finished.
  bool changed() const { return changed_; }

  /// Returns why the update cannot be captured into a CUDA graph; empty if it can.
  std::string capture_refusal() const { return partial_.capture_refusal(); }

  /// Share of denormal numbers among the gradients of the update.
  double denormal_share() const;

 private:
  void final_from(int stage);
  void update_some(const std::vector<torch::Tensor>& parameters);

  torch::Device device_;
  PartialOptimizer& partial_;
  std::unique_ptr<compat::WorkLane> lane_;
  std::vector<int> cuts_;
  std::vector<std::vector<torch::Tensor>> by_stage_;  // by the first use
  size_t stages_left_ = 0;               // stages whose gradients are not final
  std::vector<torch::Tensor> updated_;   // since begin()
  std::vector<torch::Tensor> recorded_;  // by the CUDA graphs
  bool active_ = false;
  bool captured_ = false;
  bool changed_ = false;
  bool count_denormals_ = false;
  double values_ = 0, denormals_ = 0;
};

}  // namespace reprise::detail
