#pragma once

#include <cstdint>

namespace reprise {

/// For tests: while it lives, one allocation of a CPU tensor fails as a real one
/// does (the same c10::Error), so that what comes after can be looked at. It is
/// number `after` from now, counted from 0 over all threads, of those of at least
/// `min_bytes`; allocations inside a compat::ReservedScope neither count nor
/// fail. Allocations before and after it succeed. One at a time in a process;
/// a second throws c10::Error.
///
///     const AllocationFailure failure(100);
///     train();
///     EXPECT_TRUE(failure.happened());
class AllocationFailure {
 public:
  explicit AllocationFailure(int64_t after, int64_t min_bytes = 0);
  ~AllocationFailure();
  AllocationFailure(const AllocationFailure&) = delete;
  AllocationFailure& operator=(const AllocationFailure&) = delete;

  bool happened() const;

  /// Allocations counted so far. With an `after` that is never reached: how many
  /// there are to choose from.
  int64_t counted() const;
};

}  // namespace reprise
