#pragma once

#include <cstdint>

namespace reprise::compat {

/// Called with the bytes asked for after each allocation, and with the same
/// figure negated before they are freed; from any thread.
using AllocationListener = void (*)(int64_t bytes);

/// Replaces LibTorch's CPU allocator, for the rest of the process, by one that
/// reports to `listener`. Tensors that already exist stay with the old one and
/// are never reported. Costs 64 bytes and some nanoseconds an allocation.
/// Throws where a listener is installed already.
void install_cpu_allocator(AllocationListener listener);

}  // namespace reprise::compat
