#pragma once

#include <algorithm>
#include <cstdint>

namespace reprise::detail {

/// Calls `body(first, count)` for consecutive chunks of 0, …, size - 1, each of at most
/// `max_count`.
///
/// Libraries compute a matrix product in tiles, and the remainder at the edge, as well as
/// very small products, with other kernels, which may round differently. To get the bits of
/// the whole product, chunks are multiples of a tile, and a small remainder is joined to
/// the last chunk. Chunks have about equal sizes, since each may cost a pass over a weight
/// whatever its size. Tested by tests/ops/loss_test.cpp.
template <class F>
void for_each_chunk(int64_t size, int64_t max_count, F&& body) {
  constexpr int64_t kTile = 64;
  const bool tiles = max_count >= 2 * kTile;
  const int64_t max_rest = tiles ? kTile - 1 : 0;
  int64_t chunk = tiles ? (max_count - max_rest) / kTile * kTile
                        : std::max<int64_t>(max_count, 1);
  if (tiles && size > max_rest) {
    const int64_t chunks = (size - max_rest + chunk - 1) / chunk;
    const int64_t even = (size + chunks - 1) / chunks;
    chunk = std::min(chunk, (even + kTile - 1) / kTile * kTile);
  }
  for (int64_t first = 0; first < size;) {
    const int64_t left = size - first;
    const int64_t count = left <= chunk + max_rest ? left : chunk;
    body(first, count);
    first += count;
  }
}

/// Number of calls by for_each_chunk().
inline int64_t count_chunks(int64_t size, int64_t max_count) {
  int64_t chunks = 0;
  for_each_chunk(size, max_count, [&](int64_t, int64_t) { ++chunks; });
  return chunks;
}

}  // namespace reprise::detail
