#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <unordered_map>

namespace reprise::compat {

/// Large blocks of CPU memory, kept for the next request of the same size.
///
/// malloc takes blocks of this size from the kernel and gives them back at once, so that
/// every tensor begins with page faults: more than half of the processor time of a network
/// on images of 448 pixels. A training asks for the same sizes in every step.
///
/// What is kept and what is in use are together never more than the most that was in use
/// at one moment: a process does not grow by the cache. Thread-safe.
class BlockCache {
 public:
  /// Smaller blocks are malloc's own business.
  static constexpr size_t kLeastBytes = size_t{1} << 20;

  /// Throws c10::Error if the system has no memory, after giving back what is kept.
  void* take(size_t bytes);
  /// `bytes` as it was taken with.
  void give(void* block, size_t bytes);
  /// Gives back what is kept; what is in use now is the most from here on.
  void release();

  int64_t kept_bytes() const;

 private:
  struct Kept {
    void* block;
    size_t bytes;
  };
  using Age = std::list<Kept>;

  void evict(Age::iterator oldest);

  mutable std::mutex mutex_;
  Age by_age_;  // the oldest first
  std::unordered_multimap<size_t, Age::iterator> by_size_;
  int64_t used_bytes_ = 0;
  int64_t kept_bytes_ = 0;
  int64_t most_bytes_ = 0;
};

}  // namespace reprise::compat
