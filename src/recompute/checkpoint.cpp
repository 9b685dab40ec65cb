// Not reentrant: the function runs in the caller's own graph, with hooks that
// put an empty slot in the place of every tensor autograd saves. The first slot
// that the backward opens runs the function again, under hooks that catch what
// is saved, in the same order, into the slots.
//
// Nesting: the inputs are kept through autograd's own SavedVariable, and so
// through the hooks of a checkpoint around this one. They become slots there,
// and opening them recomputes the outer function first.
#include "compat/saved_tensors.h"
#include "recompute/recompute_context.h"

#include <reprise/memory/kept.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <mutex>
#include <optional>

namespace reprise {
namespace {

using torch::autograd::SavedVariable;

/// The place of one saved tensor.
struct Slot {
  size_t index;
  std::vector<int64_t> sizes;
  c10::ScalarType dtype;
  torch::Tensor value;            // defined between recomputation and use
  int64_t version = 0;            // of value, when it was caught
  std::shared_ptr<void> counted;  // by the meter, like value
};

/// Ends a recomputation that has all it needs. Not a std::exception, so that
/// no handler of the function's own takes it for an error.
struct EnoughRecomputed {};

/// One call of checkpoint(), from its forward until its graph is gone.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  Frame(std::function<Tensors(const Tensors&)> function, const Tensors& inputs,
        const CheckpointOptions& options)
      : function_(std::move(function)),
        early_stop_(options.early_stop),
        context_(
            inputs,
            options.modules.empty() ? CurrentModules::get() : options.modules,
            options.generators),
        place_(KeptMeter::current()) {
    for (const auto& input : inputs) {
      // Behind hooks, a SavedVariable refers to a leaf's accumulator weakly
      // and will ask for it.
      if (input.defined() && input.is_leaf() && input.requires_grad()) {
        accumulators_.push_back(torch::autograd::impl::grad_accumulator(input));
      }
      inputs_.emplace_back(input, /*is_output=*/false);
      requires_grad_.push_back(input.defined() && input.requires_grad());
    }
  }

  Tensors first_run(const Tensors& inputs);

  std::shared_ptr<Slot> add_slot(const torch::Tensor& tensor) {
    auto slot = std::make_shared<Slot>(Slot{
        slots_.size(), tensor.sizes().vec(), tensor.scalar_type(), {}, 0, {}});
    slots_.push_back(slot);
    return slot;
  }

  torch::Tensor open(Slot& slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!slot.value.defined()) recompute();
    TORCH_CHECK(slot.value._version() == slot.version,
                "[checkpoint] saved tensor ", slot.index,
                " was modified in place by the function after it was saved");
    slot.counted.reset();
    // Handed over: a graph that is retained is recomputed for its next use.
    return std::exchange(slot.value, {});
  }

  /// Called for each tensor that the recomputation saves, in order.
  void catch_value(const torch::Tensor& tensor) {
    const size_t index = caught_++;
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
      if (place_.meter) {
        slot->counted = place_.meter->hold(slot->value, place_.stage);
      }
    }
    if (early_stop_ && index == last_needed_) throw EnoughRecomputed{};
  }

 private:
  void recompute();
  void drop_values() {
    for (const auto& weak : slots_) {
      if (const auto slot = weak.lock()) {
        slot->value.reset();
        slot->counted.reset();
      }
    }
  }

  std::function<Tensors(const Tensors&)> function_;
  bool early_stop_;
  std::vector<SavedVariable> inputs_;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
  std::vector<bool> requires_grad_;
  RecomputeContext context_;
  KeptMeter::Place place_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Slot>> slots_;  // gone where the graph let go
  size_t caught_ = 0;
  size_t last_needed_ = 0;
};

class SlotHooks final : public compat::SavedTensorHooks {
 public:
  explicit SlotHooks(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    slot_ = frame_->add_slot(tensor);
  }
  at::Tensor call_unpack_hook() override { return frame_->open(*slot_); }

 private:
  std::shared_ptr<Frame> frame_;
  std::shared_ptr<Slot> slot_;
};

class CatchHooks final : public compat::SavedTensorHooks {
 public:
  explicit CatchHooks(Frame& frame) : frame_(&frame) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    frame_->catch_value(tensor);
  }
  at::Tensor call_unpack_hook() override {
    TORCH_CHECK(false,
                "[checkpoint] a backward inside a checkpointed function cannot "
                "run through what that function itself saved");
  }

 private:
  Frame* frame_;
};

class SlotPolicy final : public compat::SavedTensorPolicy {
 public:
  explicit SlotPolicy(std::shared_ptr<Frame> frame)
      : frame_(std::move(frame)) {}
  std::unique_ptr<compat::SavedTensorHooks> make_hooks() override {
    return std::make_unique<SlotHooks>(frame_);
  }

 private:
  std::shared_ptr<Frame> frame_;
};

class CatchPolicy final : public compat::SavedTensorPolicy {
 public:
  explicit CatchPolicy(Frame& frame) : frame_(&frame) {}
  std::unique_ptr<compat::SavedTensorHooks> make_hooks() override {
    return std::make_unique<CatchHooks>(*frame_);
  }

 private:
  Frame* frame_;
};

int64_t version_of(const torch::Tensor& tensor) {
  return tensor.defined() ? tensor._version() : 0;
}

Tensors Frame::first_run(const Tensors& inputs) {
  std::vector<int64_t> versions;
  for (const auto& input : inputs) versions.push_back(version_of(input));
  Tensors outputs;
  {
    const compat::SavedTensorScope scope(
        std::make_shared<SlotPolicy>(shared_from_this()));
    outputs = function_(inputs);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(version_of(inputs[i]) == versions[i], "[checkpoint] input ", i,
                " was changed in place by the function, which therefore "
                "cannot be run again; use an operator that does not");
  }
  context_.finish_first_run();
  return outputs;
}

void Frame::recompute() {
  Tensors inputs;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    torch::Tensor input = inputs_[i].unpack();
    inputs.push_back(input.defined()
                         ? input.detach().requires_grad_(requires_grad_[i])
                         : input);
  }
  caught_ = 0;
  last_needed_ = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].expired()) last_needed_ = i;
  }
  // What this backward does not come to use must not outlive it.
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
    const RecomputeGuard replay(context_);
    const compat::SavedTensorScope scope(std::make_shared<CatchPolicy>(*this));
    function_(inputs);
  } catch (const EnoughRecomputed&) {
    return;
  } catch (...) {
    drop_values();
    throw;
  }
  if (caught_ <= last_needed_) {
    drop_values();
    TORCH_CHECK(false,
                "[checkpoint] expected the function to do the same when "
                "recomputed, but it saved ",
                caught_, " tensors and ", slots_.size(), " on its first run");
  }
}

}  // namespace

Tensors checkpoint_list(std::function<Tensors(const Tensors&)> function,
                        const Tensors& inputs,
                        const CheckpointOptions& options) {
  TORCH_CHECK(function, "[checkpoint] expected a function, got none");
  if (!torch::GradMode::is_enabled()) return function(inputs);
  return std::make_shared<Frame>(std::move(function), inputs, options)
      ->first_run(inputs);
}

}  // namespace reprise
