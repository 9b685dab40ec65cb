#pragma once

#include <reprise/memory/meter.h>
#include <reprise/recompute/stage.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace reprise::detail {

/// The distinct storages of a list of tensors, in order. Tested by
/// tests/recompute/stage_costs_test.cpp.
class Storages {
 public:
  explicit Storages(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
      if (!tensor.defined() || !tensor.has_storage()) continue;
      const void* key = tensor.storage().unsafeGetStorageImpl();
      if (!position_.emplace(key, static_cast<int>(keys_.size())).second) {
        continue;
      }
      keys_.push_back(key);
      bytes_.push_back(allocated_bytes(
          static_cast<int64_t>(tensor.storage().nbytes()), tensor.device()));
    }
  }

  size_t size() const { return keys_.size(); }
  const void* key(size_t i) const { return keys_[i]; }
  const std::vector<int64_t>& bytes() const { return bytes_; }

  /// Returns the index of a storage, or -1 if it is not in the list.
  int find(const void* key) const {
    const auto found = position_.find(key);
    return found == position_.end() ? -1 : found->second;
  }

 private:
  std::unordered_map<const void*, int> position_;
  std::vector<const void*> keys_;
  std::vector<int64_t> bytes_;
};

}  // namespace reprise::detail
