#pragma once

#include "train/step/batch_source.h"
#include "train/step/step_runner.h"
#include "train/step/train_setup.h"

#include <reprise/memory/categories.h>
#include <reprise/memory/kept.h>
#include <reprise/train/optimizer.h>

namespace reprise::detail {

/// Registers with `ledger` what the parts of a training hold, so that their memory is
/// attributed to its category. All arguments must outlive the ledger. Tested by
/// tests/train/profile/profile_test.cpp.
inline void claim_memory(MemoryLedger& ledger, const TrainSetup& setup,
                         const BatchSource& source, const StepRunner& runner,
                         const Optimizer& optimizer, const KeptMeter& kept) {
  ledger.claim(Category::kData, [&source] { return source.current().tensors; });
  if (setup.sharded) {
    // Before the parameters, whose memory is part of it.
    ledger.claim(Category::kParameters,
                 [&setup] { return setup.sharded->held(); });
    ledger.claim(Category::kGradients, [&setup] {
      std::vector<torch::Tensor> gradients;
      for (const auto& [name, piece] : updated_parameters(setup)) {
        if (piece.grad().defined()) gradients.push_back(piece.grad());
      }
      for (const auto& parameter : setup.parameter_list) {
        if (parameter.grad().defined()) gradients.push_back(parameter.grad());
      }
      return gradients;
    });
    ledger.claim(Category::kParameters,
                 [&setup] { return setup.model.root->buffers(); });
  } else {
    ledger.claim_model(setup.parameter_list, setup.model.root->buffers());
  }
  ledger.claim(Category::kParameters,
               [&runner] { return runner.weight_copies(); });
  ledger.claim(Category::kOptimizer, [&optimizer] { return optimizer.held(); });
  ledger.claim_kept(kept);
}

}  // namespace reprise::detail
