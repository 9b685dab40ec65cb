#include "plan/update_cuts.h"

#include <algorithm>

namespace reprise::detail {

std::vector<int> update_cuts(const std::vector<int64_t>& final_bytes) {
  // All sets but the first of the chain have at least this size. They are at most this much
  // larger than the largest stage.
  constexpr int64_t kShare = 8;
  int64_t largest = 0;
  for (const int64_t bytes : final_bytes) largest = std::max(largest, bytes);
  const int64_t least = std::max<int64_t>(1, largest / kShare);
  std::vector<int> cuts;
  int64_t in_set = 0;
  for (size_t i = final_bytes.size(); i-- > 1;) {
    in_set += final_bytes[i];
    if (in_set < least) continue;
    cuts.push_back(static_cast<int>(i));
    in_set = 0;
  }
  return cuts;
}

int64_t most_held_bytes(int64_t gradient_bytes) {
  constexpr int64_t kShare = 32;
  return gradient_bytes / kShare;
}

}  // namespace reprise::detail
