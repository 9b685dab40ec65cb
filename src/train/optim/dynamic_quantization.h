#pragma once

#include <array>
#include <cstdint>
#include <vector>

/// The 256 numbers in [-1, 1] that a byte can stand for in a quantized moment:
/// "dynamic quantization" of Dettmers, Lewis, Shleifer and Zettlemoyer 2022,
/// "8-bit optimizers via block-wise quantization".
///
/// Moments of one block differ by factors of a million, so equal steps would
/// make most of them 0. A byte is read as a sign, z zeros, a one, and the rest as
/// a fraction: the number is ± 10^-z times the middle of one of the equal parts
/// that the fraction's bits divide [0.1, 1] into. Large numbers get a long
/// fraction, small ones a large exponent. Without a sign the fraction has one bit
/// more.
namespace reprise {

/// Ascending, 0 and 1 included. Signed: -1 is not.
std::array<float, 256> dynamic_code(bool with_sign);

/// Finds the nearest code without a search, which takes a processor ten times as
/// long: the first bits of a float say which, or the one below it. In full,
///
///     cell = (bits of x >> kCellShift) + kCells / 2, with x's sign in the bits
///     nearest code = first[cell] + (x > above[first[cell]])
struct NearestCode {
  static constexpr int kCellShift = 16;
  static constexpr int64_t kCells = 1 << 16;
  std::vector<uint8_t> first;    ///< of a cell's lowest number
  std::array<float, 256> above;  ///< half-way to the next code; the last: inf
};

/// With `skip_zero` what is nearest to a lowest code of 0 gets the next one.
NearestCode nearest_code(const std::array<float, 256>& code, bool skip_zero);

}  // namespace reprise
