#pragma once

#include <reprise/recompute/schedule.h>
#include <reprise/recompute/simulate.h>

#include <cstdint>

namespace reprise::detail {

/// `schedule` with what its stages have in the host's memory brought back one backward
/// ahead of need, wherever the peak stays within `bytes`. Takes the same time by
/// simulate(), which knows what a stage waits for when nothing is fetched ahead.
Schedule fetch_ahead(const Schedule& schedule, const ChainCosts& figures,
                     int64_t bytes);

}  // namespace reprise::detail
