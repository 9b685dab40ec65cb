#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

/// Which values the fields of TrainConfig may have. One definition per field, used
/// by TrainConfig::resolve(), by the command line and by study files alike.
namespace reprise {

/// Takes a value as text. Returns "" if it is allowed, else what was expected and
/// what was given: "expected a whole number from 1 to 16384, got 'abc'".
using FieldCheck = std::function<std::string(const std::string& text)>;

/// A whole number in decimal digits.
FieldCheck whole_number(int64_t low, uint64_t high);

enum class Ends { kBoth, kLow, kNone };

/// A finite number between `low` and `high`; `ends`: which of the two are allowed.
FieldCheck real_number(double low, double high, Ends ends = Ends::kBoth);

/// One of `words`. Otherwise the nearest of them is named.
FieldCheck one_of(std::vector<std::string> words);

/// A size as parse_bytes() reads it, of at least `least` bytes.
FieldCheck byte_size(int64_t least);

/// cpu, cuda or cuda:N, or one of `also`. Does not look for the device.
FieldCheck device_name(std::vector<std::string> also = {});

/// A Strategy, or one of `also`.
FieldCheck strategy_text(std::vector<std::string> also = {});

/// A Strategy, "optimal", or the text of a schedule.
FieldCheck recompute_text();

/// The check for a flag of `reprise train` that is a field of TrainConfig, such as
/// "--batch"; null if any value is allowed, or if there is no such flag.
const FieldCheck* field_check(std::string_view flag);

}  // namespace reprise
