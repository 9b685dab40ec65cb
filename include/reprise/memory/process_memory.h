#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace reprise {

/// Memory of this process as reported by the operating system, in bytes.
/// Besides tensors it includes code, BLAS and oneDNN scratch space, thread
/// stacks and freed memory that malloc has not returned.
struct ProcessMemory {
  int64_t rss = 0;       ///< resident set size
  int64_t rss_peak = 0;  ///< maximum since the start or the last reset
};

/// Returns the values of /proc/self/status, or zeros if it cannot be read.
ProcessMemory process_memory();

/// Returns the bytes that can be allocated on the host without swapping, or 0
/// if the system does not report them.
int64_t available_memory();

/// Returns the free bytes of `device`. For the CPU, this is available_memory().
int64_t available_memory(c10::Device device);

/// Resets `rss_peak` to the current `rss`. Returns false if the kernel does not
/// allow it.
bool reset_process_peak();

}  // namespace reprise
