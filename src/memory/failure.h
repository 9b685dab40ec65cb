#pragma once

#include <cstdint>

namespace reprise {

/// Fault injection for tests. During the object's lifetime one allocation of a
/// CPU tensor fails with the c10::Error that a real failure throws.
///
/// Allocations of at least `min_bytes` are counted from 0 over all threads, and
/// number `after` fails; all others succeed. Allocations inside a
/// compat::ReservedScope are neither counted nor failed. Only one object may
/// exist per process: the constructor throws c10::Error if there is another
/// one, or if an argument is negative.
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

  /// Returns whether the allocation has failed.
  bool happened() const;

  /// Returns the number of allocations counted so far. With an `after` that is
  /// never reached, this is the number of possible failure points.
  int64_t counted() const;
};

}  // namespace reprise
