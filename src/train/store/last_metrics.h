#pragma once

#include <reprise/train/summary.h>

#include <string>

namespace reprise::detail {

/// Sets the losses and metrics that `summary` does not have, because an earlier process
/// computed them, to the last ones in the file metrics.jsonl at `path`. Leaves them unset if
/// the file is missing or does not have them. Tested by
/// tests/train/loop/run_training_test.cpp.
void add_last_metrics(TrainSummary& summary, const std::string& path);

}  // namespace reprise::detail
