#include "recompute/kept_calls.h"

#include "base/nearest.h"
#include "recompute/checkpoint_frame.h"
#include "recompute/holding_hooks.h"
#include "recompute/stage_checks.h"
#include "recompute/stage_graph.h"

#include <algorithm>

namespace reprise::detail {
namespace {

/// Returns the first of `inputs` of which `tensor` is a view; -1 if none.
int input_of(const at::Tensor& tensor, const Tensors& inputs) {
  const auto is_plain = [](const at::Tensor& t) {
    return t.defined() && t.layout() == at::kStrided && t.has_storage() &&
           !t.is_quantized() && !t.is_conj() && !t.is_neg();
  };
  if (!is_plain(tensor)) return -1;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (is_plain(inputs[i]) && tensor.is_alias_of(inputs[i]) &&
        tensor.scalar_type() == inputs[i].scalar_type()) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

}  // namespace

/// Saves one tensor of a kept function.
class KeepHooks final : public compat::SavedTensorHooks {
 public:
  KeepHooks(const KeptCalls& calls, KeptCalls::Call& call,
            CheckpointFrame& frame, const Tensors& inputs)
      : calls_(&calls), call_(&call), frame_(&frame), inputs_(&inputs) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const int input = input_of(tensor, *inputs_);
    if (input < 0) {
      hooks_ = calls_->make_hooks(call_->place);
    } else {
      const auto i = static_cast<size_t>(input);
      hooks_ = frame_->make_slot_hooks();
      call_->saved_inputs.push_back(
          {i, tensor.sizes().vec(), tensor.strides().vec(),
           tensor.storage_offset() - (*inputs_)[i].storage_offset()});
    }
    hooks_->call_pack_hook(tensor);
  }
  at::Tensor call_unpack_hook() override { return hooks_->call_unpack_hook(); }

 private:
  // Used while the function runs; the hooks live longer.
  const KeptCalls* calls_;
  KeptCalls::Call* call_;
  CheckpointFrame* frame_;
  const Tensors* inputs_;
  std::unique_ptr<compat::SavedTensorHooks> hooks_;
};

/// Applies while a kept function runs for the first time.
class KeepPolicy final : public compat::SavedTensorPolicy {
 public:
  KeepPolicy(const KeptCalls& calls, KeptCalls::Call& call,
             CheckpointFrame& frame, const Tensors& inputs)
      : calls_(&calls), call_(&call), frame_(&frame), inputs_(&inputs) {}
  std::unique_ptr<compat::SavedTensorHooks> make_hooks() override {
    return std::make_unique<KeepHooks>(*calls_, *call_, *frame_, *inputs_);
  }

 private:
  const KeptCalls* calls_;
  KeptCalls::Call* call_;
  CheckpointFrame* frame_;
  const Tensors* inputs_;
};

void KeptCalls::begin() {
  outer_ = compat::SavedTensorScope::current();
  // An outer checkpoint drops the values anyway.
  if (store_ && !std::dynamic_pointer_cast<FramePolicy>(outer_)) {
    host_.emplace(store_, offload_);
  }
}

void KeptCalls::finish() {
  outer_.reset();
  if (host_) host_->finish();
  host_.reset();
  if (!names_) return;
  for (const std::string& name : *names_) {
    TORCH_CHECK(std::find(seen_.begin(), seen_.end(), name) != seen_.end(),
                "[checkpoint] expected names of keep() calls of the function "
                "in keep_names, got '",
                name, "'", did_you_mean(name, seen_));
  }
}

bool KeptCalls::keeps(const std::string& name) const {
  if (!names_) return true;
  return std::find(names_->begin(), names_->end(), name) != names_->end();
}

std::unique_ptr<compat::SavedTensorHooks> KeptCalls::make_hooks(
    Place place) const {
  if (place == Place::kHost && host_) return host_->make_hooks();
  auto hooks = outer_ ? outer_->make_hooks() : nullptr;
  if (!hooks) hooks = std::make_unique<HoldingHooks>();
  return hooks;
}

KeptCalls::Output KeptCalls::keep_output(const torch::Tensor& output,
                                         Place place) const {
  Output kept;
  if (!output.defined()) return kept;
  kept.requires_grad = output.requires_grad();
  if (!output.is_inference()) {
    kept.counter = output.unsafeGetTensorImpl()->version_counter();
    kept.version = kept.counter->current_version();
  }
  kept.hooks = make_hooks(place);
  kept.hooks->call_pack_hook(output.detach());
  return kept;
}

Tensors KeptCalls::first_run(CheckpointFrame& frame, const std::string& name,
                             const Function& function, const Tensors& inputs,
                             Place place) {
  Call call;
  call.name = name;
  call.place = place;
  std::vector<int64_t> versions;
  for (const auto& input : inputs) versions.push_back(version_of(input));
  const auto rng = compat::RngState::capture(inputs, generators_);
  Tensors outputs;
  {
    const compat::SavedTensorScope scope(
        std::make_shared<KeepPolicy>(*this, call, frame, inputs));
    outputs = function(inputs);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(version_of(inputs[i]) == versions[i], "[keep] input ", i,
                " of '", name,
                "' was modified in place by the function, which a "
                "recomputation does not run; use an out-of-place operator");
  }
  call.rng = compat::RngState::capture_like(rng);
  call.rng.forget_unchanged(rng);
  for (const auto& output : outputs) {
    call.outputs.push_back(keep_output(output, place));
  }
  calls_.push_back(std::move(call));
  return outputs;
}

Tensors KeptCalls::replay(CheckpointFrame& frame, const std::string& name,
                          const Tensors& inputs) {
  TORCH_CHECK(next_ < calls_.size() && calls_[next_].name == name,
              "[keep] expected the checkpointed function to do the same when "
              "recomputed; call ",
              next_, " of keep() was '",
              next_ < calls_.size() ? calls_[next_].name : std::string(),
              "', is now '", name, "'");
  const Call& call = calls_[next_++];
  for (const SavedInput& saved : call.saved_inputs) {
    TORCH_CHECK(saved.input < inputs.size() && inputs[saved.input].defined(),
                "[keep] expected the checkpointed function to do the same when "
                "recomputed; '",
                name, "' now has no input ", saved.input);
    const torch::Tensor input = inputs[saved.input].detach();
    frame.store_value(input.as_strided(saved.sizes, saved.strides,
                                       input.storage_offset() + saved.offset));
  }
  Tensors outputs;
  const auto collector = GradientCollector::make();
  for (const Output& output : call.outputs) {
    if (!output.hooks) {
      outputs.emplace_back();
      continue;
    }
    TORCH_CHECK(
        !output.counter || output.counter->current_version() == output.version,
        "[keep] the value '", name,
        "' was modified in place after it was kept; use an "
        "out-of-place operator");
    const torch::Tensor value = output.hooks->call_unpack_hook();
    outputs.push_back(output.requires_grad ? collector->attach(value)
                                           : value.detach());
  }
  call.rng.restore();
  return outputs;
}

}  // namespace reprise::detail
