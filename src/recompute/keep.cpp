#include "recompute/checkpoint_frame.h"

#include <reprise/recompute/keep.h>

#include <utility>

namespace reprise {
namespace {

Tensors call_kept(const char* call, detail::KeptCalls::Place place,
                  const std::string& name,
                  const std::function<Tensors(const Tensors&)>& function,
                  const Tensors& inputs) {
  TORCH_CHECK(function, "[", call, "] expected a function for '", name,
              "', got none");
  // Other hooks apply inside of a kept function, of a nested chain, or outside.
  const auto policy = std::dynamic_pointer_cast<detail::FramePolicy>(
      compat::SavedTensorScope::current());
  if (!policy) return function(inputs);
  detail::KeptCalls& calls = policy->frame().kept_calls();
  if (!policy->recomputing()) calls.record_name(name);
  if (!calls.keeps(name)) return function(inputs);
  return policy->recomputing()
             ? calls.replay(policy->frame(), name, inputs)
             : calls.first_run(policy->frame(), name, function, inputs, place);
}

}  // namespace

Tensors keep_list(const std::string& name,
                  const std::function<Tensors(const Tensors&)>& function,
                  const Tensors& inputs) {
  return call_kept("keep", detail::KeptCalls::Place::kDevice, name, function,
                   inputs);
}

Tensors offload_list(const std::string& name,
                     const std::function<Tensors(const Tensors&)>& function,
                     const Tensors& inputs) {
  return call_kept("offload", detail::KeptCalls::Place::kHost, name, function,
                   inputs);
}

Stage with_named_saves(const Stage& stage, std::shared_ptr<HostStore> store,
                       const HostOptions& options) {
  CheckpointOptions named;
  named.modules = stage.modules();
  const auto checkpointed = [&stage](const CheckpointOptions& chosen) {
    return [function = stage.function(), chosen](const Tensors& inputs) {
      return checkpoint_list(function, inputs, chosen);
    };
  };
  CheckpointOptions none = named;
  none.keep_names.emplace();
  Stage result = stage.with_variant(kRecomputed, checkpointed(none))
                     .with_variant(kRecomputedButNamed, checkpointed(named));
  if (!store) return result;
  CheckpointOptions offloaded = named;
  offloaded.offload_store = std::move(store);
  offloaded.offload = options;
  return result.with_variant(kNamedOnHost, checkpointed(offloaded));
}

}  // namespace reprise
