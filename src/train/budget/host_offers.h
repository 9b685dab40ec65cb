#pragma once

#include "train/step/train_setup.h"

#include <reprise/recompute/simulate.h>

#include <cstdint>

namespace reprise::detail {

/// Restricts offloading to the stages with the longest forward per offloaded byte whose
/// activations together fit in the host store, beside `state_bytes` of state. For all other
/// stages, and those that offload nothing, the variant gets the costs of the plain run. Tested
/// by tests/train/budget/planning_test.cpp.
void limit_host_bytes(const TrainSetup& setup, int64_t state_bytes,
                      ChainCosts& figures);

}  // namespace reprise::detail
