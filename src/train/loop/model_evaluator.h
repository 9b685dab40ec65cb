#pragma once

#include "train/step/oom_retry.h"
#include "train/step/ranks.h"
#include "train/step/step_runner.h"
#include "train/step/train_setup.h"

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace reprise::detail {

/// Evaluates the model on the test data, which is divided among the ranks.
/// Tested by tests/train/loop/trainer_test.cpp.
class ModelEvaluator {
 public:
  struct Result {
    double loss = 0;                        ///< mean
    std::map<std::string, double> metrics;  ///< means of Model::metrics
  };

  /// Keeps references to all arguments.
  ModelEvaluator(const TrainSetup& setup, Ranks& ranks, StepRunner& runner,
                 OomRetry& retry)
      : setup_(setup), ranks_(ranks), runner_(runner), retry_(retry) {}

  /// Whether there is test data.
  bool enabled() const { return setup_.data.test != nullptr; }

  /// Evaluates the model after update `step`. A single process calls `stop`
  /// between batches; if it returns true, the result is nullopt. If memory runs
  /// out, the evaluation is repeated, from the second failure on with smaller
  /// batches.
  std::optional<Result> run(int64_t step, const std::function<bool()>& stop);

 private:
  struct Sums {
    std::vector<double> outputs{};  // the loss, then the metrics
    double count = 0;
    bool complete = true;
  };
  Sums run_once(int64_t batch_size, const std::function<bool()>& stop);
  /// Adds all batches, in step with ranks that have more or have failed: they gather the
  /// parameters together. Throws c10::OutOfMemoryError on all ranks if one has no memory.
  void run_in_step(const std::function<std::optional<Batch>()>& next,
                   const std::function<void(Batch&)>& add);

  const TrainSetup& setup_;
  Ranks& ranks_;
  StepRunner& runner_;
  OomRetry& retry_;
};

}  // namespace reprise::detail
