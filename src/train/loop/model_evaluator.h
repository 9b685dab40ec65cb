#pragma once

#include "train/step/oom_retry.h"
#include "train/step/ranks.h"
#include "train/step/step_runner.h"
#include "train/step/train_setup.h"

#include <cstdint>
#include <functional>
#include <optional>

namespace reprise::detail {

/// Evaluates the model on the test split, divided among the ranks.
class ModelEvaluator {
 public:
  struct Result {
    double loss = 0;      ///< mean
    double accuracy = 0;  ///< share of right predictions
  };

  /// Keeps references to all of them. `stop` is asked between batches by a single process.
  ModelEvaluator(const TrainSetup& setup, Ranks& ranks, StepRunner& runner,
                 OomRetry& retry)
      : setup_(setup), ranks_(ranks), runner_(runner), retry_(retry) {}

  /// Whether there is a test split.
  bool enabled() const { return setup_.data.test != nullptr; }

  /// Nothing if `stop` ended it early. After update `step`. If memory runs out it is
  /// repeated, from the second time on with smaller batches.
  std::optional<Result> run(int64_t step, const std::function<bool()>& stop);

 private:
  struct Sums {
    double loss = 0, right = 0, count = 0;
    bool complete = true;
  };
  Sums run_once(int64_t batch_size, const std::function<bool()>& stop);

  const TrainSetup& setup_;
  Ranks& ranks_;
  StepRunner& runner_;
  OomRetry& retry_;
};

}  // namespace reprise::detail
