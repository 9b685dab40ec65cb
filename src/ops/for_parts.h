#pragma once

#include <algorithm>
#include <cstdint>

namespace reprise {

/// Calls `body(first, count)` for parts of `size`, none larger than `most`.
///
/// Libraries compute a product in tiles, and what is left at the edge with other
/// kernels, which may round in another way; so too for very small products. For
/// the same bits as in the whole product, parts are whole tiles, and a small rest
/// goes with the part before it. Parts are about equal: each may cost as much as a
/// pass over a weight, whatever its size.
template <class F>
void for_parts(int64_t size, int64_t most, F&& body) {
  constexpr int64_t kTile = 64;
  const bool tiles = most >= 2 * kTile;
  const int64_t rest = tiles ? kTile - 1 : 0;  // at most, besides a part
  int64_t part =
      tiles ? (most - rest) / kTile * kTile : std::max<int64_t>(most, 1);
  if (tiles && size > rest) {
    const int64_t parts = (size - rest + part - 1) / part;
    const int64_t even = (size + parts - 1) / parts;
    part = std::min(part, (even + kTile - 1) / kTile * kTile);
  }
  for (int64_t first = 0; first < size;) {
    const int64_t left = size - first;
    const int64_t count = left <= part + rest ? left : part;
    body(first, count);
    first += count;
  }
}

}  // namespace reprise
