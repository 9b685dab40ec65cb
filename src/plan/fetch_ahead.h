#pragma once

#include <reprise/recompute/schedule.h>
#include <reprise/recompute/simulate.h>

#include <cstdint>

namespace reprise::detail {

/// Returns `schedule` with prefetching: activations in host memory are fetched
/// one backward before they are needed, as long as the peak stays at most
/// `bytes`. The simulated time is the same, since simulate() does not model
/// waiting for copies. Tested by tests/recompute/host_memory_test.cpp.
Schedule fetch_ahead(const Schedule& schedule, const ChainCosts& chain_costs,
                     int64_t bytes);

}  // namespace reprise::detail
