#pragma once

#include "compat/saved_tensors.h"
#include "recompute/kept_calls.h"
#include "recompute/recompute_context.h"

#include <reprise/memory/kept.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

/// The state of checkpoint(). Tested by tests/recompute/checkpoint_test.cpp.
namespace reprise::detail {

/// Placeholder for one saved tensor.
struct Slot {
  size_t index;
  std::vector<int64_t> sizes;
  c10::ScalarType dtype;
  torch::Tensor value;            // defined between recomputation and use
  int64_t version = 0;            // version of value when it was stored
  std::shared_ptr<void> counted;  // keeps value counted by the meter
};

/// State of one call of checkpoint(), from its forward until its autograd graph
/// is destroyed.
class CheckpointFrame : public std::enable_shared_from_this<CheckpointFrame> {
 public:
  CheckpointFrame(std::function<Tensors(const Tensors&)> function,
                  const Tensors& inputs, const CheckpointOptions& options);

  Tensors first_run(const Tensors& inputs);

  /// Returns hooks that replace the tensor that they pack with a new slot.
  std::unique_ptr<compat::SavedTensorHooks> make_slot_hooks();

  /// Stores a tensor that the recomputation saves. Called in the order of
  /// saving. Throws to end the recomputation if it was the last one needed.
  void store_value(const torch::Tensor& tensor);

  /// Stores the next tensors that the recomputation will save, if the last one needed is among
  /// them, and throws to end the recomputation.
  void end_with(const std::vector<torch::Tensor>& tensors);

  /// The calls of keep() in the function.
  KeptCalls& kept_calls() { return kept_calls_; }

 private:
  friend class SlotHooks;
  std::shared_ptr<Slot> add_slot(const torch::Tensor& tensor);
  torch::Tensor unpack(Slot& slot);
  void recompute();
  void drop_values();

  std::function<Tensors(const Tensors&)> function_;
  bool early_stop_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
  std::vector<bool> requires_grad_;
  RecomputeContext context_;
  KeptMeter::Target target_;
  KeptCalls kept_calls_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Slot>> slots_;  // expired if the graph freed them
  size_t stored_ = 0;
  size_t last_needed_ = 0;
};

/// Applies while the function of a frame runs: the first time, or again.
class FramePolicy final : public compat::SavedTensorPolicy {
 public:
  FramePolicy(CheckpointFrame& frame, bool recomputing)
      : frame_(&frame), recomputing_(recomputing) {}
  std::unique_ptr<compat::SavedTensorHooks> make_hooks() override;
  bool keeps() const override { return recomputing_; }
  void before_output(const std::vector<torch::Tensor>& to_save) override {
    if (recomputing_) frame_->end_with(to_save);
  }

  CheckpointFrame& frame() const { return *frame_; }
  bool recomputing() const { return recomputing_; }

 private:
  CheckpointFrame* frame_;
  bool recomputing_;
};

}  // namespace reprise::detail
