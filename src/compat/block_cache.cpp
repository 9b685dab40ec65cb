#include "compat/block_cache.h"

#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace reprise::compat {

void* BlockCache::take(size_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    used_bytes_ += static_cast<int64_t>(bytes);
    const auto found = by_size_.find(bytes);
    if (found != by_size_.end()) {
      void* block = found->second->block;
      by_age_.erase(found->second);
      by_size_.erase(found);
      kept_bytes_ -= static_cast<int64_t>(bytes);
      return block;
    }
    max_bytes_ = std::max(max_bytes_, used_bytes_);
    while (used_bytes_ + kept_bytes_ > max_bytes_) evict(by_age_.begin());
  }
  try {
    return c10::alloc_cpu(bytes);
  } catch (const c10::Error&) {
    const bool had_some = kept_bytes() > 0;
    const auto failed = [&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      used_bytes_ -= static_cast<int64_t>(bytes);
    };
    if (!had_some) {
      failed();
      throw;
    }
    release();
    try {
      return c10::alloc_cpu(bytes);
    } catch (const c10::Error&) {
      failed();
      throw;
    }
  }
}

void BlockCache::give(void* block, size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  // A cached block would hide a use after free.
  c10::free_cpu(block);
  const std::lock_guard<std::mutex> lock(mutex_);
  used_bytes_ -= static_cast<int64_t>(bytes);
#else
  const std::lock_guard<std::mutex> lock(mutex_);
  used_bytes_ -= static_cast<int64_t>(bytes);
  kept_bytes_ += static_cast<int64_t>(bytes);
  by_age_.push_back({block, bytes});
  by_size_.emplace(bytes, std::prev(by_age_.end()));
#endif
}

void BlockCache::release() {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!by_age_.empty()) evict(by_age_.begin());
  max_bytes_ = used_bytes_;
}

int64_t BlockCache::kept_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return kept_bytes_;
}

void BlockCache::evict(Age::iterator oldest) {
  const auto [first, last] = by_size_.equal_range(oldest->bytes);
  const auto entry = std::find_if(
      first, last, [&](const auto& item) { return item.second == oldest; });
  by_size_.erase(entry);
  kept_bytes_ -= static_cast<int64_t>(oldest->bytes);
  c10::free_cpu(oldest->block);
  by_age_.erase(oldest);
}

}  // namespace reprise::compat
