#include "recompute/checkpoint_frame.h"

#include <reprise/recompute/keep.h>

namespace reprise {

Tensors keep_list(const std::string& name,
                  const std::function<Tensors(const Tensors&)>& function,
                  const Tensors& inputs) {
  TORCH_CHECK(function, "[keep] expected a function for '", name,
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
             : calls.first_run(policy->frame(), name, function, inputs);
}

Stage with_named_saves(const Stage& stage) {
  CheckpointOptions options;
  options.modules = stage.modules();
  const auto checkpointed = [&stage](const CheckpointOptions& chosen) {
    return [function = stage.function(), chosen](const Tensors& inputs) {
      return checkpoint_list(function, inputs, chosen);
    };
  };
  CheckpointOptions none = options;
  none.keep_names.emplace();
  return stage.with_variant(kRecomputed, checkpointed(none))
      .with_variant(kRecomputedButNamed, checkpointed(options));
}

}  // namespace reprise
