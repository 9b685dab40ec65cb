#pragma once

#include <reprise/train/config.h>
#include <reprise/train/planning.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace reprise {

/// Predicted memory and time of a training. Less accurate than a plan's.
struct TrainingPrediction {
  int64_t peak_bytes = 0;  ///< on the device
  double step_ms = 0;      ///< milliseconds per window
};

/// Predicts many trainings from few measurements: runs each stage of a model
/// once at two micro-batch sizes, and interpolates linearly for all trainings
/// of that model. `configs` must be resolved. The result has one entry per
/// configuration. It is nullopt if the training cannot be built, leaves its
/// micro-batch to a planner, or does not fit on the device even at the smallest
/// size.
std::vector<std::optional<TrainingPrediction>> predict_trainings(
    const std::vector<TrainConfig>& configs,
    const PlanningOptions& options = {});

}  // namespace reprise
