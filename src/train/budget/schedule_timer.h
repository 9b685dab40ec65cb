#pragma once

#include "train/step/train_setup.h"

#include <reprise/recompute/schedule.h>
#include <reprise/train/optimizer.h>

#include <cstdint>
#include <vector>

namespace reprise::detail {

/// Times micro-batches as a training runs them: through a StepRunner, with
/// batches read by worker threads, and in rows of consecutive micro-batches
/// that are long enough for the host to run ahead of the device. Tested by
/// tests/train/budget/schedule_timer_test.cpp.
class ScheduleTimer {
 public:
  struct Timing {
    bool warm_up = true;  ///< run some untimed micro-batches first
    int rows = 3;         ///< number of rows; the result is their median
  };
  struct Trial {
    Precision precision = Precision::kFp32;
    int64_t micro_batch = 1;
    const Schedule& schedule;
    bool accumulate = true;  ///< add to existing gradients
    bool graph = false;      ///< run as a CUDA graph
    /// With kBackward, the micro-batches also update the parameters, with a learning rate of
    /// 0, which does not change them. With `accumulate` as well, every other one does.
    UpdateMode update = UpdateMode::kAfter;
    Optimizer* optimizer = nullptr;  ///< for kBackward
  };
  struct Result {
    double ms = 0;           ///< per micro-batch
    int64_t peak_bytes = 0;  ///< of the device's memory
  };

  explicit ScheduleTimer(const TrainSetup& setup) : setup_(setup) {}

  /// Runs micro-batches. The caller must restore the state of the model: gradients stay
  /// allocated and random numbers are drawn. `any` is used if the data has fewer samples
  /// than a micro-batch.
  Result time(const Trial& trial, Batch any, const Timing& timing) const;

 private:
  const TrainSetup& setup_;
};

/// Returns the median, or the lower median of an even number of values.
double median_of(std::vector<double> values);

}  // namespace reprise::detail
