// Note [Non-reentrant checkpointing]
// The function runs as part of the caller's autograd graph, with hooks that
// replace every tensor that autograd saves with an empty slot. The first slot
// that the backward unpacks runs the function again. Hooks then store the
// tensors that this run saves, in the same order, in the slots.
//
// Checkpoints nest. The inputs are saved as autograd's SavedVariable, and so
// through the hooks of an enclosing checkpoint. They become slots of the
// latter, and unpacking them recomputes the outer function first.
#include "recompute/checkpoint_frame.h"
#include "recompute/stage_checks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace reprise {
namespace detail {
namespace {

/// Thrown to stop a recomputation early. Not a std::exception, so that handlers
/// in the function do not treat it as an error.
struct StopRecomputation {};

/// Applies to the tensors that a recomputation saves.
class StoreHooks final : public compat::SavedTensorHooks {
 public:
  explicit StoreHooks(CheckpointFrame& frame) : frame_(&frame) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    frame_->store_value(tensor);
  }
  at::Tensor call_unpack_hook() override {
    TORCH_CHECK(false,
                "[checkpoint] a checkpointed function cannot run a backward "
                "through tensors that it saved itself");
  }

 private:
  CheckpointFrame* frame_;
};

const Modules& modules_of(const CheckpointOptions& options) {
  return options.modules.empty() ? CurrentModules::get() : options.modules;
}

}  // namespace

/// Applies to the tensors that the first run saves.
class SlotHooks final : public compat::SavedTensorHooks {
 public:
  explicit SlotHooks(std::shared_ptr<CheckpointFrame> frame)
      : frame_(std::move(frame)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    slot_ = frame_->add_slot(tensor);
  }
  at::Tensor call_unpack_hook() override { return frame_->unpack(*slot_); }

 private:
  std::shared_ptr<CheckpointFrame> frame_;
  std::shared_ptr<Slot> slot_;
};

std::unique_ptr<compat::SavedTensorHooks> FramePolicy::make_hooks() {
  if (recomputing_) return std::make_unique<StoreHooks>(*frame_);
  return frame_->make_slot_hooks();
}

CheckpointFrame::CheckpointFrame(
    std::function<Tensors(const Tensors&)> function, const Tensors& inputs,
    const CheckpointOptions& options)
    : function_(std::move(function)),
      early_stop_(options.early_stop),
      context_(inputs, modules_of(options), options.generators),
      target_(KeptMeter::current()),
      kept_calls_(options) {
  for (const auto& input : inputs) {
    // With hooks, a SavedVariable holds only a weak reference to the
    // accumulator of a leaf, but needs it when it is unpacked.
    if (input.defined() && input.is_leaf() && input.requires_grad()) {
      accumulators_.push_back(torch::autograd::impl::grad_accumulator(input));
    }
    inputs_.emplace_back(input, /*is_output=*/false);
    requires_grad_.push_back(input.defined() && input.requires_grad());
  }
}

std::unique_ptr<compat::SavedTensorHooks> CheckpointFrame::make_slot_hooks() {
  return std::make_unique<SlotHooks>(shared_from_this());
}

std::shared_ptr<Slot> CheckpointFrame::add_slot(const torch::Tensor& tensor) {
  auto slot = std::make_shared<Slot>(Slot{
      slots_.size(), tensor.sizes().vec(), tensor.scalar_type(), {}, 0, {}});
  slots_.push_back(slot);
  return slot;
}

torch::Tensor CheckpointFrame::unpack(Slot& slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!slot.value.defined()) recompute();
  TORCH_CHECK(slot.value._version() == slot.version,
              "[checkpoint] saved tensor ", slot.index,
              " was modified in place by the function after it was saved");
  slot.counted.reset();
  // The slot is emptied. If the graph is retained, its next use recomputes.
  return std::exchange(slot.value, {});
}

void CheckpointFrame::store_value(const torch::Tensor& tensor) {
  const size_t index = stored_++;
  TORCH_CHECK(index < slots_.size(),
              "[checkpoint] expected the function to "
              "do the same when recomputed, but it saved more than the ",
              slots_.size(), " tensors of its first run");
  const auto slot = slots_[index].lock();
  if (slot) {
    TORCH_CHECK(
        tensor.sizes() == slot->sizes && tensor.scalar_type() == slot->dtype,
        "[checkpoint] expected the function to do the same when "
        "recomputed; saved tensor ",
        index, " was ", slot->dtype, " ", slot->sizes, ", is now ",
        tensor.scalar_type(), " ", tensor.sizes());
    slot->value = tensor.detach();
    slot->version = slot->value._version();
    if (target_.meter) {
      slot->counted = target_.meter->hold(slot->value, target_.stage);
    }
  }
  if (early_stop_ && index == last_needed_) throw StopRecomputation{};
}

void CheckpointFrame::end_with(const Tensors& tensors) {
  if (!early_stop_ || stored_ + tensors.size() <= last_needed_) return;
  for (const auto& tensor : tensors) store_value(tensor);
}

void CheckpointFrame::drop_values() {
  for (const auto& weak : slots_) {
    if (const auto slot = weak.lock()) {
      slot->value.reset();
      slot->counted.reset();
    }
  }
}

Tensors CheckpointFrame::first_run(const Tensors& inputs) {
  std::vector<int64_t> versions;
  for (const auto& input : inputs) versions.push_back(version_of(input));
  Tensors outputs;
  {
    kept_calls_.begin();
    const compat::SavedTensorScope scope(
        std::make_shared<FramePolicy>(*this, /*recomputing=*/false));
    outputs = function_(inputs);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(version_of(inputs[i]) == versions[i], "[checkpoint] input ", i,
                " was modified in place by the function, which therefore "
                "cannot be recomputed; use an out-of-place operator");
  }
  kept_calls_.finish();
  context_.finish_first_run();
  return outputs;
}

void CheckpointFrame::recompute() {
  Tensors inputs;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    torch::Tensor input = inputs_[i].unpack();
    inputs.push_back(input.defined()
                         ? input.detach().requires_grad_(requires_grad_[i])
                         : input);
  }
  stored_ = 0;
  last_needed_ = 0;
  kept_calls_.restart();
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].expired()) last_needed_ = i;
  }
  // Values that this backward does not use must not outlive it.
  if (torch::autograd::get_current_graph_task_exec_info() != nullptr) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [weak = weak_from_this()] {
          if (const auto frame = weak.lock()) {
            const std::lock_guard<std::mutex> lock(frame->mutex_);
            frame->drop_values();
          }
        });
  }
  try {
    const RecomputeGuard guard(context_);
    const compat::SavedTensorScope scope(
        std::make_shared<FramePolicy>(*this, /*recomputing=*/true));
    function_(inputs);
  } catch (const StopRecomputation&) {
    return;
  } catch (...) {
    drop_values();
    throw;
  }
  if (stored_ <= last_needed_) {
    drop_values();
    TORCH_CHECK(false,
                "[checkpoint] expected the function to do the same when "
                "recomputed, but it saved ",
                stored_, " tensors and ", slots_.size(), " on its first run");
  }
}

}  // namespace detail

Tensors checkpoint_list(std::function<Tensors(const Tensors&)> function,
                        const Tensors& inputs,
                        const CheckpointOptions& options) {
  TORCH_CHECK(function, "[checkpoint] expected a function, got none");
  if (!torch::GradMode::is_enabled()) return function(inputs);
  const RunScope run(inputs);
  return std::make_shared<detail::CheckpointFrame>(std::move(function), inputs,
                                                   options)
      ->first_run(inputs);
}

}  // namespace reprise
