#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace reprise::compat {

/// Called with the size after each allocation, and with the negated size before
/// the memory is freed. Called by any thread. Tested by tests/memory/meter_test.cpp.
using AllocationListener = void (*)(int64_t bytes);

/// Replaces LibTorch's CPU allocator, for the rest of the process, with one
/// that reports to `listener`. Existing tensors keep the old allocator and are
/// not reported; see start_reporting(). The overhead per allocation is 64 bytes and a few
/// nanoseconds. Throws c10::Error if a listener is already installed.
void install_cpu_allocator(AllocationListener listener);

/// Reports the memory of a storage that was allocated before, as if it were
/// allocated now, and when it is freed. Returns its size, or 0 if it is reported
/// already or was excluded by stop_reporting(). Must not be called while another
/// thread uses the storage.
int64_t start_reporting(c10::Storage storage);

/// Reports the memory of `data` as freed and excludes it from further reports.
/// Returns its size, or 0 if it was allocated by another allocator or is
/// excluded already.
int64_t stop_reporting(const c10::DataPtr& data);

/// Returns the allocator's cached blocks to the system. The allocator caches
/// large blocks for tensors of the same size. Cached blocks and blocks in use
/// together never exceed the maximum that was in use at one time since the last
/// call.
void release_cpu_blocks();

/// Implements memory/failure.h. Lets one allocation fail: number `after`,
/// counted from 0, of those of at least `min_bytes` outside of a ReservedScope.
/// While no failure is injected, the overhead is a relaxed load per allocation.
/// Throws c10::Error if an argument is negative or if a failure is being
/// injected already.
void inject_failure(int64_t after, int64_t min_bytes);
/// Ends the injection.
void end_injection();

/// State of the current injection.
struct InjectedFailure {
  int64_t counted = 0;    ///< allocations counted so far
  bool happened = false;  ///< whether the allocation has failed
};
InjectedFailure injected_failure();

}  // namespace reprise::compat
