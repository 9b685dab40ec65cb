#include "train/optim/dynamic_quantization.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace reprise {

std::array<float, 256> dynamic_code(bool with_sign) {
  constexpr int kMostZeros = 6;
  std::array<float, 256> code = {0, 1};
  size_t count = 2;
  double scale = 1;
  for (int zeros = 0; zeros <= kMostZeros; ++zeros, scale /= 10) {
    const int bits = kMostZeros - zeros + (with_sign ? 0 : 1);
    const int parts = 1 << bits;
    for (int i = 0; i < parts; ++i) {
      const double value = scale * (0.1 + 0.9 * (i + 0.5) / parts);
      code.at(count++) = static_cast<float>(value);
      if (with_sign) code.at(count++) = static_cast<float>(-value);
    }
  }
  std::sort(code.begin(), code.end());
  return code;
}

NearestCode nearest_code(const std::array<float, 256>& code, bool skip_zero) {
  NearestCode nearest;
  for (size_t i = 0; i + 1 < code.size(); ++i) {
    nearest.above[i] = (code[i] + code[i + 1]) / 2;
  }
  nearest.above.back() = std::numeric_limits<float>::infinity();
  if (skip_zero) nearest.above[0] = -1;

  constexpr int kShift = NearestCode::kCellShift;
  for (int64_t cell = 0; cell < NearestCode::kCells; ++cell) {
    const int64_t key = cell - NearestCode::kCells / 2;
    auto bits = static_cast<uint32_t>(key) << kShift;
    // The lowest value of a negative cell has all of its lower bits set.
    if (key < 0) bits |= (uint32_t{1} << kShift) - 1;
    const auto lowest = std::bit_cast<float>(bits);
    const auto end = nearest.above.end();
    const auto found =
        std::isnan(lowest)
            ? end
            : std::lower_bound(nearest.above.begin(), end, lowest);
    const auto i = std::min<int64_t>(found - nearest.above.begin(), 255);
    nearest.first.push_back(static_cast<uint8_t>(i));
  }
  return nearest;
}

}  // namespace reprise
