#pragma once

#include <cstdint>
#include <string>

namespace reprise {

/// What the system lets this process use.
struct ProcessLimits {
  int cores = 1;  ///< by affinity and the control group's quota
  int64_t memory_bytes =
      0;  ///< the machine's or the control group's; 0: unknown
};

/// Reads /proc and /sys, both versions of control groups, those above included.
/// A quota of one and a half cores is two. `root` stands before every path.
ProcessLimits process_limits(const std::string& root = "");

}  // namespace reprise
