#include "memory/failure.h"

#include "compat/cpu_allocator.h"

#include <reprise/memory/meter.h>

namespace reprise {

AllocationFailure::AllocationFailure(int64_t after, int64_t min_bytes) {
  count_cpu_memory();  // the failing allocator is the counting one
  compat::inject_failure(after, min_bytes);
}

AllocationFailure::~AllocationFailure() {
  compat::end_injection();
}

bool AllocationFailure::happened() const {
  return compat::injected_failure().happened;
}

int64_t AllocationFailure::counted() const {
  return compat::injected_failure().counted;
}

}  // namespace reprise
