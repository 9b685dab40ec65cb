#include "base/text_check.h"
#include "base/throw_error.h"

#include <reprise/base/bytes.h>

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>

namespace reprise {
namespace {

struct Unit {
  std::string_view name;  // lower case
  double bytes;
};

constexpr double kKi = 1024.0;
constexpr std::array kUnits = {
    Unit{"", 1},
    Unit{"b", 1},
    Unit{"kib", kKi},
    Unit{"kb", 1e3},
    Unit{"mib", kKi* kKi},
    Unit{"mb", 1e6},
    Unit{"gib", kKi* kKi* kKi},
    Unit{"gb", 1e9},
    Unit{"tib", kKi* kKi* kKi* kKi},
    Unit{"tb", 1e12},
};

/// "8G" may mean 8 * 2^30 or 8 * 10^9 bytes.
bool is_ambiguous(std::string_view unit) {
  return unit.size() == 1 &&
         std::string_view("kmgt").find(unit[0]) != std::string_view::npos;
}

}  // namespace

std::string format_bytes(int64_t bytes) {
  static constexpr std::array<const char*, 4> kNames = {"KiB", "MiB", "GiB",
                                                        "TiB"};
  if (std::abs(bytes) < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / kKi;
  size_t unit = 0;
  // 999.5 would be rounded to four digits; use the next unit instead.
  while (std::abs(value) >= 999.5 && unit + 1 < kNames.size()) {
    value /= kKi;
    ++unit;
  }
  const int decimals = std::abs(value) < 9.995   ? 2
                       : std::abs(value) < 99.95 ? 1
                                                 : 0;
  return fmt::format("{:.{}f} {}", value, decimals, kNames.at(unit));
}

int64_t parse_bytes(std::string_view text) {
  const std::string copy(text);
  char* end = nullptr;
  const double number = std::strtod(copy.c_str(), &end);
  std::string unit;
  for (const char* c = end; *c != '\0'; ++c) {
    if (std::isspace(static_cast<unsigned char>(*c)) == 0) {
      unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
    }
  }
  if (end != copy.c_str() && std::isfinite(number) && number >= 0) {
    for (const Unit& known : kUnits) {
      const double bytes = number * known.bytes;
      if (unit == known.name && bytes < 9.2e18) {
        return static_cast<int64_t>(std::llround(bytes));
      }
    }
  }
  if (end != copy.c_str() && number >= 0 && is_ambiguous(unit)) {
    const std::string value =
        copy.substr(0, static_cast<size_t>(end - copy.c_str()));
    const char prefix =
        static_cast<char>(std::toupper(static_cast<unsigned char>(unit[0])));
    detail::throw_error(
        "[parse_bytes] expected {0}{1}iB (powers of 1024) or {0}{1}B (powers "
        "of 1000), got {2}",
        shortened(value, 60), prefix, in_quotes(copy));
  }
  detail::throw_error(
      "[parse_bytes] expected a size such as 8GiB or 8000MB, got {}",
      in_quotes(copy));
}

}  // namespace reprise
