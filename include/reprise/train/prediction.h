#pragma once

#include <reprise/train/config.h>
#include <reprise/train/planning.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace reprise {

/// What a training will take; rougher than a plan's figures.
struct TrainingPrediction {
  int64_t peak_bytes = 0;
  double step_ms = 0;  ///< a window
};

/// Predicts many trainings from few measurements: one run of each stage at two
/// micro-batch sizes for each model, everything else by the line through them.
/// `configs` resolved. Nothing for a training that cannot be predicted so: one
/// that cannot be made, whose micro-batch is open, or whose smallest size the
/// device has no room for.
std::vector<std::optional<TrainingPrediction>> predict_trainings(
    const std::vector<TrainConfig>& configs,
    const PlanningOptions& options = {});

}  // namespace reprise
