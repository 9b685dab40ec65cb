#pragma once

#include <reprise/train/config.h>
#include <reprise/train/inputs.h>

#include <string>

namespace reprise::detail {

/// Time of a window as `train` runs it.
struct StepTime {
  double ms = 0;      ///< median over several windows
  std::string graph;  ///< see TrainSummary::graph
};

/// Trains a few windows with a Trainer and times them: with its CUDA graphs,
/// weight copies and batches that are read ahead, and without any observer. The
/// learning rate is 0, and windows that are shorter than the others do not
/// count. `expected_ms` is a rough time of a window, which decides how many
/// windows are run. Throws c10::Error if the options cannot be run. Tested by
/// tests/train/profile/profile_test.cpp.
StepTime time_step(TrainInputs inputs, TrainConfig options, double expected_ms);

}  // namespace reprise::detail
