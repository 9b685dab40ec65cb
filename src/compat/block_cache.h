#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <unordered_map>

namespace reprise::compat {

/// Cache of large blocks of CPU memory for requests of the same size.
///
/// malloc() maps blocks of this size and unmaps them when they are freed, so
/// that every tensor causes page faults. In a network on images of 448 pixels
/// they take more than half of the CPU time. Training requests the same sizes
/// in every step.
///
/// Cached blocks and blocks in use together never exceed the maximum that was
/// in use at one time, so that the cache does not enlarge the process.
/// Thread-safe.
class BlockCache {
 public:
  /// Smaller blocks should be allocated with malloc().
  static constexpr size_t kMinBytes = size_t{1} << 20;

  /// Returns a block of `bytes`. If the system is out of memory, frees all
  /// cached blocks and tries again; throws c10::Error if that fails too.
  void* take(size_t bytes);
  /// Returns a block to the cache. `bytes` must be the size passed to take().
  void give(void* block, size_t bytes);
  /// Frees all cached blocks and resets the maximum to the bytes in use.
  void release();

  int64_t kept_bytes() const;  ///< bytes of cached blocks

 private:
  struct Kept {
    void* block;
    size_t bytes;
  };
  using Age = std::list<Kept>;

  void evict(Age::iterator oldest);

  mutable std::mutex mutex_;
  Age by_age_;  // oldest first
  std::unordered_multimap<size_t, Age::iterator> by_size_;
  int64_t used_bytes_ = 0;
  int64_t kept_bytes_ = 0;
  int64_t max_bytes_ = 0;
};

}  // namespace reprise::compat
