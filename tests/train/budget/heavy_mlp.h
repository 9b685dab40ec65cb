#pragma once

#include "plans.h"
#include "train/runs.h"

#include <reprise/train/planning.h>

#include <cstdint>
#include <string>

/// A training of which little fits on the device.
namespace reprise::testing {

constexpr int64_t kHostLimit = int64_t{1} << 30;
constexpr int64_t kHostChunk = int64_t{256} << 10;

/// Most of its memory are parameters and what belongs to them.
inline TrainConfig heavy_mlp() {
  TrainConfig config = small("mlp");
  config.model_options.dropout = -1;
  config.model_options.depth = 12;
  config.model_options.width = 256;
  config.random_samples = 16;
  config.batch = 4;
  config.accumulate = 1;
  config.epochs = 0;
  config.steps = 3;
  config.update = UpdateMode::kAfter;
  return config;
}

inline PlanResult quick_plan(TrainConfig config, StatePlace place,
                             int64_t memory, const std::string& strategy = "") {
  config.state = place;
  config.resolve();
  PlanningOptions quick;
  quick.quick = true;
  PlanRequest request = request_for(config, memory);
  request.strategy = strategy;
  return plan_training(config, request, quick);
}

/// Expects a training with `plan` to have the predicted peak.
inline void expect_predicted_peak(TrainConfig config, const Plan& plan,
                                  const std::string& what) {
  config.resolve();
  const auto measured = measure_plan(config, plan, 0, /*windows=*/2);
  EXPECT_NEAR(static_cast<double>(plan.peak_bytes) /
                  static_cast<double>(measured.peak_bytes),
              1, 0.03)
      << what;
}

}  // namespace reprise::testing
