#pragma once

#include "train/step/train_setup.h"

#include <reprise/recompute/schedule.h>

#include <cstdint>
#include <string>
#include <vector>

namespace reprise::detail {

/// Times micro-batches as a training runs them: through its StepRunner, with batches read
/// by its workers, and in rows long enough for the host to run ahead of the device.
class ScheduleTimer {
 public:
  struct Timing {
    bool warm_up = true;  ///< run some micro-batches first
    int rows = 3;         ///< of which the median counts
  };
  struct Trial {
    std::string precision;
    int64_t micro_batch = 1;
    const Schedule& schedule;
    bool accumulate = true;  ///< add to gradients that exist
    bool graph = false;      ///< as a CUDA graph
  };

  explicit ScheduleTimer(const TrainSetup& setup) : setup_(setup) {}

  /// Milliseconds per micro-batch. Leaves gradients behind and draws random numbers: the
  /// caller restores the model's state. `any` is used if the data has too few samples.
  double time(const Trial& trial, Batch any, const Timing& timing) const;

 private:
  const TrainSetup& setup_;
};

/// Median; of an even number of values the lower one.
double median_of(std::vector<double> values);

}  // namespace reprise::detail
