#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace reprise {

/// What the operating system says of this process, in bytes. Beside the
/// allocator's figures it holds code, BLAS and oneDNN scratch, thread stacks
/// and freed memory that malloc keeps.
struct ProcessMemory {
  int64_t rss = 0;       ///< resident now
  int64_t rss_peak = 0;  ///< most since the start or the last reset
};

/// Reads /proc/self/status; zeros where there is none.
ProcessMemory process_memory();

/// What the system could still give without swapping; 0 where it does not say.
int64_t available_memory();

/// Free memory of `device`; of the host if it is the CPU.
int64_t available_memory(c10::Device device);

/// Starts a new `rss_peak`. False where the kernel does not allow it.
bool reset_process_peak();

}  // namespace reprise
