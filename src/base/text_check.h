#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

/// Checks of values that are given as text, on a command line or in a file.
namespace reprise {

/// Returns "" if `text` is allowed, else what was expected and what was given:
/// "expected a whole number from 1 to 16384, got 'abc'".
using TextCheck = std::function<std::string(const std::string& text)>;

/// A whole number in decimal digits.
TextCheck whole_number(int64_t low, uint64_t high);

/// Which ends of a range belong to it.
enum class Ends { kBoth, kLow, kNone };

/// A finite number between `low` and `high`.
TextCheck real_number(double low, double high, Ends ends = Ends::kBoth);

/// One of `words`. The message suggests the nearest one.
TextCheck one_of(std::vector<std::string> words);

/// A size as parse_bytes() reads it, of at least `least` bytes.
TextCheck byte_size(int64_t least);

/// Whether `text` is not empty and has only letters, digits, '.', '-' and '_', so that it
/// can be a value on a command line and a part of a path.
bool is_plain_name(const std::string& text);

/// Whether `text` is well-formed UTF-8, as JSON needs it.
bool is_utf8(std::string_view text);

/// `text`, shortened to about `most` bytes if it is longer.
std::string shortened(const std::string& text, size_t most = 200);

/// `text` in quotes, shortened if it is long.
std::string in_quotes(const std::string& text);
/// The same for names of tensors and stages, which are longer than other texts.
std::string quoted_name(const std::string& name);

/// Message of an exception without the "[function] " at its beginning. "[--flag] " becomes
/// "--flag: ".
std::string without_origin(const std::string& message);

}  // namespace reprise
