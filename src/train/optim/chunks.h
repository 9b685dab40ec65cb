#pragma once

#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <vector>

/// Divides a list of parameters into chunks of bounded size. A chunk holds many
/// small parameters or a part of a large one. Tested by
/// tests/train/optim/adam8bit_test.cpp.
namespace reprise {

/// Values [begin, begin + count) of a parameter in row-major order.
struct Piece {
  size_t at = 0;      ///< index of the parameter
  int64_t begin = 0;  ///< a multiple of the block size
  int64_t count = 0;
  int64_t place = 0;  ///< offset in the chunk; a multiple of the block size
};

struct Chunk {
  std::vector<Piece> pieces;
  int64_t values = 0;  ///< total size, with each piece rounded up to blocks
};

/// Divides parameters with `sizes` values each (0: skipped) into chunks of at
/// most `most` values, in order. `most` must be a multiple of `block`.
inline std::vector<Chunk> divide(const std::vector<int64_t>& sizes,
                                 int64_t block, int64_t most) {
  std::vector<Chunk> chunks;
  for (size_t at = 0; at < sizes.size(); ++at) {
    for (int64_t begin = 0; begin < sizes[at];) {
      if (chunks.empty() || chunks.back().values == most) chunks.emplace_back();
      Chunk& chunk = chunks.back();
      const int64_t count = std::min(sizes[at] - begin, most - chunk.values);
      chunk.pieces.push_back({at, begin, count, chunk.values});
      chunk.values += (count + block - 1) / block * block;
      begin += count;
    }
  }
  return chunks;
}

/// Returns the number of values of the largest chunk.
inline int64_t longest(const std::vector<Chunk>& chunks) {
  int64_t values = 0;
  for (const Chunk& chunk : chunks) values = std::max(values, chunk.values);
  return values;
}

/// Calls `use(views, done)` with views of `tensors`, which have equal shapes.
/// Together the views cover the values [begin, begin + count) of each tensor;
/// `done` is the number of values in earlier calls. Contiguous tensors need one
/// call, others several.
template <class Use>
void for_range(const std::vector<torch::Tensor>& tensors, int64_t begin,
               int64_t count, const Use& use, int64_t done = 0) {
  const auto each = [&](auto&& view) {
    std::vector<torch::Tensor> views;
    for (const auto& tensor : tensors) views.push_back(view(tensor));
    return views;
  };
  if (std::all_of(tensors.begin(), tensors.end(),
                  [](const auto& t) { return t.is_contiguous(); })) {
    use(each([&](const auto& t) { return t.view(-1).narrow(0, begin, count); }),
        done);
    return;
  }
  const int64_t row = tensors[0].numel() / tensors[0].size(0);
  while (count > 0) {
    const int64_t first = begin / row;
    const int64_t inside = begin % row;
    int64_t part = count / row * row;
    if (inside > 0 || part == 0) {
      part = std::min(count, row - inside);
      for_range(each([&](const auto& t) { return t.select(0, first); }), inside,
                part, use, done);
    } else {
      use(each([&](const auto& t) { return t.narrow(0, first, part / row); }),
          done);
    }
    begin += part;
    done += part;
    count -= part;
  }
}

}  // namespace reprise
