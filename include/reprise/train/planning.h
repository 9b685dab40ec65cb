#pragma once

#include <reprise/data/dataset.h>
#include <reprise/data/prepare.h>
#include <reprise/models/model.h>
#include <reprise/recompute/schedule.h>
#include <reprise/train/config.h>

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace reprise {

/// Decides for a session what to run within its memory budget, again and again as
/// more becomes known. May run the model to measure it: the session puts random
/// generators, buffers and gradients back afterwards.
class BudgetPlanner {
 public:
  virtual ~BudgetPlanner() = default;

  struct Decision {
    int64_t micro_batch;
    int64_t accumulate;
    Schedule schedule;
    int64_t predicted_peak_bytes;
    double predicted_step_ms;
    std::string text;  ///< for people, one line
  };

  /// The first decision. Throws c10::Error with what would fit where nothing
  /// does.
  virtual Decision decide() = 0;

  /// The peak passed the budget by `over_bytes`, or an allocation failed (0: by
  /// how much is unknown). Keeps the micro-batch if any schedule of it needs less
  /// than the present one, since then results stay the same to the bit; a smaller
  /// micro-batch otherwise. Nothing: no smaller one is left.
  virtual std::optional<Decision> tighten(const Decision& present,
                                          int64_t over_bytes) = 0;
};

/// What a planner may measure with. All belong to the session and outlive the
/// planner.
struct PlanningParts {
  /// Batch 0: to be chosen. It follows the decisions: copy what must not change.
  const TrainConfig& config;
  const Model& model;  ///< on its device
  torch::Device device;
  const Dataset& data;
  const PrepareOptions& prepare;
};

std::unique_ptr<BudgetPlanner> make_budget_planner(const PlanningParts& parts);

}  // namespace reprise
