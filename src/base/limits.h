#pragma once

#include <cstdint>
#include <string>

namespace reprise {

/// Resources that the system grants this process.
struct ProcessLimits {
  int cores = 1;  ///< by CPU affinity and cgroup quota
  /// Memory of the machine or the cgroup, whichever is smaller; 0: unknown.
  int64_t memory_bytes = 0;
};

/// Reads /proc and /sys, for both versions of cgroups, including parent groups. A
/// fractional CPU quota is rounded up. `root` is prepended to every path.
ProcessLimits process_limits(const std::string& root = "");

}  // namespace reprise
