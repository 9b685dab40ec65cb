#pragma once

#include "dtype.h"
#include "kernel.h"

#include <cstdint>

/// CUDA kernel of ops::rotary() and ops::split_heads(): rotates heads, or copies them, from
/// one layout to another, queries, keys and values in one pass. Tested by
/// tests/ops/rotary_test.cpp and tests/ops/split_heads_test.cpp.
namespace reprise::detail::kernels {

/// Heads (N, heads, T, D) in memory: elements from one sample, head and position to the
/// next. Channels are adjacent.
struct HeadsLayout {
  int64_t sample = 0;
  int64_t head = 0;
  int64_t position = 0;
};

/// Heads that are read from one place and written to another, which may be the same.
struct HeadsPart {
  int64_t heads = 0;  ///< 0: no such part
  bool rotates = false;
  const void* from = nullptr;
  HeadsLayout from_layout{};
  void* to = nullptr;
  HeadsLayout to_layout{};
};

/// Pointers are aligned to 16 bytes, and strides are multiples of 16 bytes.
struct RotateHeads {
  static constexpr int kParts = 3;
  static constexpr int64_t kMaxDim = 512;  ///< largest D

  int64_t samples = 0;
  int64_t positions = 0;
  int64_t dim = 0;  ///< D, a multiple of 8 (float32) or 16, at most kMaxDim
  DType type = DType::kFloat32;
  HeadsPart parts[kParts]{};
  const float* cos = nullptr;  ///< (positions, D / 2) per sample or for all
  const float* sin = nullptr;
  int64_t table_stride =
      0;                 ///< from one sample to the next; 0: one table for all
  bool inverse = false;  ///< rotates by the negative angles
};
REPRISE_KERNEL(rotate_heads, RotateHeads);

}  // namespace reprise::detail::kernels
