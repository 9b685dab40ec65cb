#pragma once

#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <vector>

/// Work on a list of parameters in chunks of bounded size, whatever the sizes of
/// the parameters: a chunk holds many small ones, or a part of a large one.
namespace reprise {

/// Values [begin, begin + count) of parameter `at`, in row-major order, and their
/// place in the chunk. Begin and place are multiples of the block.
struct Piece {
  size_t at = 0;
  int64_t begin = 0;
  int64_t count = 0;
  int64_t place = 0;
};

struct Chunk {
  std::vector<Piece> pieces;
  int64_t values =
      0;  // whole blocks: what is left of a piece's last one counts
};

/// Parameters of `sizes` values (0: left out), in their order, in chunks of at
/// most `most` values, a multiple of `block`.
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

inline int64_t longest(const std::vector<Chunk>& chunks) {
  int64_t values = 0;
  for (const Chunk& chunk : chunks) values = std::max(values, chunk.values);
  return values;
}

/// `use(views, done)` with views of `tensors`, all of one shape, that together
/// are values [begin, begin + count) of each; `done` values came before. One
/// view each, unless strides are not those of row-major order: then by rows.
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
