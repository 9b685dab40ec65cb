#pragma once

#include <array>
#include <cstdint>
#include <vector>

/// Dynamic quantization of optimizer moments to 8 bits (Dettmers, Lewis,
/// Shleifer and Zettlemoyer 2022, "8-bit optimizers via block-wise
/// quantization").
///
/// The moments of one block differ by factors of up to a million, so that
/// linear quantization would round most of them to 0. A byte consists of a
/// sign, z zero bits, a one bit and a fraction. The fraction's bits divide
/// [0.1, 1] into equal intervals; the value is ± 10^-z times the midpoint of
/// one of them. Large values thus have a long fraction, small values a large
/// exponent. An unsigned code has one more bit for the fraction.
///
/// Tested by tests/train/optim/adam8bit_test.cpp.
namespace reprise {

/// Returns the values of the 256 codes in ascending order. They include 0 and
/// 1, but not -1.
std::array<float, 256> dynamic_code(bool with_sign);

/// Tables to find the nearest code without a binary search, which takes about
/// ten times as long on a CPU. The upper bits of a float select a cell, whose
/// values all have the same nearest code or one of two adjacent codes:
///
///     cell = (bits of x >> kCellShift) + kCells / 2, with x's sign in the bits
///     nearest code = first[cell] + (x > above[first[cell]])
struct NearestCode {
  static constexpr int kCellShift = 16;
  static constexpr int64_t kCells = 1 << 16;
  std::vector<uint8_t> first;  ///< code of the lowest value of each cell
  std::array<float, 256>
      above;  ///< midpoint to the next code; inf for the last
};

/// Returns the tables for `code`. With `skip_zero`, values nearest to a lowest
/// code of 0 get the next code.
NearestCode nearest_code(const std::array<float, 256>& code, bool skip_zero);

}  // namespace reprise
