#pragma once

#include <c10/core/Allocator.h>

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

/// Reports the bytes behind `data` as freed now, once, and never again. Returns their
/// number; 0 if another allocator made them or they were left out before.
int64_t stop_reporting(const c10::DataPtr& data);

/// Gives the system back what freed tensors left in this allocator, which keeps large
/// blocks for the next tensor of the same size. What it keeps and what is in use are
/// together never more than the most that was in use at once since the last call.
void release_cpu_blocks();

/// Behind memory/failure.h: makes allocation number `after` from now, of those of
/// at least `min_bytes` outside a ReservedScope, fail. Costs a relaxed load an
/// allocation while nothing is injected.
void inject_failure(int64_t after, int64_t min_bytes);
void end_injection();

struct InjectedFailure {
  int64_t counted = 0;
  bool happened = false;
};
InjectedFailure injected_failure();

}  // namespace reprise::compat
