#pragma once

#include <atomic>
#include <cstdint>

namespace reprise::detail {

/// A limit that several users of host memory share. Thread-safe. Tested by
/// tests/memory/host_tensors_test.cpp.
class HostQuota {
 public:
  explicit HostQuota(int64_t limit_bytes) : limit_(limit_bytes) {}

  /// Takes `bytes` from the quota; returns false if less is left.
  bool take(int64_t bytes) {
    int64_t used = used_;
    do {
      if (bytes > limit_ - used) return false;
    } while (!used_.compare_exchange_weak(used, used + bytes));
    return true;
  }
  void give(int64_t bytes) { used_ -= bytes; }

  int64_t limit_bytes() const { return limit_; }
  int64_t used_bytes() const { return used_; }

 private:
  const int64_t limit_;
  std::atomic<int64_t> used_{0};
};

}  // namespace reprise::detail
