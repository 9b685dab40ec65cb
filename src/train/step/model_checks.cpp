#include "train/step/model_checks.h"

#include "compat/cuda_graph.h"
#include "compat/rng.h"
#include "data/batch_check.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/check_chain.h>

#include <algorithm>
#include <unordered_set>

namespace reprise::detail {

void check_owned(const Model& model, const char* caller) {
  std::unordered_set<const c10::TensorImpl*> owned;
  for (const auto& parameter : model.root->parameters()) {
    owned.insert(parameter.unsafeGetTensorImpl());
  }
  for (int i = 0; i < model.chain.size(); ++i) {
    for (const auto& module : model.chain[i].modules()) {
      for (const auto& item : module->named_parameters()) {
        const auto& parameter = item.value();
        TORCH_CHECK(
            !parameter.requires_grad() ||
                owned.contains(parameter.unsafeGetTensorImpl()),
            "[", caller, "] expected stage ", i, " '", model.chain[i].name(),
            "' to train parameters of the model only, got '", item.key(),
            "', which Model::root does not own; register its module in "
            "the root, or set its requires_grad to false");
      }
    }
  }
}

void check_model(const TrainSetup& setup) {
  check_owned(setup.model, "Trainer");
  const torch::Tensor on_device = torch::empty({0}, setup.device);
  const compat::RngGuard restore(compat::RngState::capture({on_device}));
  try {
    // Two samples if possible, because BatchNorm cannot train on one.
    const int64_t batch = setup.options.batch;
    Batch some = largest_batch(*setup.data.train,
                               batch > 0 ? std::min<int64_t>(batch, 2) : 2);
    move_to(some, setup.device);
    prepare_batch(setup, some);
    const compat::AutocastGuard autocast(setup.autocast);
    check_chain(setup.model.chain, some.tensors);
    check_loss(setup.model.chain, some.tensors);
  } catch (const c10::Error& error) {
    if (!is_out_of_memory(error)) throw;
  }
  // The training may use another stream, which has workspaces of its own.
  compat::release_workspaces(setup.device);
}

}  // namespace reprise::detail
