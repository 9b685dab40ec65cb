#include "data/tensor_checksums.h"

#include "base/checksum.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <charconv>

namespace reprise::detail {
namespace {

constexpr size_t kDigits = 16;

/// Position of the value in a header, which is compact JSON. Quotes inside strings follow a
/// backslash, so that nothing else looks like this key.
size_t find_value(const std::string& header) {
  const std::string key = fmt::format("\"{}\":\"", kChecksumsKey);
  const size_t at = header.find(key);
  return at == std::string::npos ? at : at + key.size();
}

/// Checksum of a header whose own digits are zeros.
std::string sum_of(const std::string& header) {
  return fmt::format("{:016x}", checksum_of(header.data(), header.size()));
}

}  // namespace

std::string empty_checksums(size_t tensors) {
  return std::string((tensors + 1) * kDigits, '0');
}

void fill_checksums(std::string& header, const TensorChecksums& tensors) {
  const size_t value = find_value(header);
  TORCH_INTERNAL_ASSERT(value != std::string::npos);
  size_t at = value + kDigits;
  for (const auto& [name, sum] : tensors) {
    header.replace(at, kDigits, fmt::format("{:016x}", sum));
    at += kDigits;
  }
  header.replace(value, kDigits, sum_of(header));
}

std::optional<TensorChecksums> parse_checksums(std::string header,
                                               const std::string& value,
                                               TensorChecksums tensors) {
  const size_t at = find_value(header);
  if (at == std::string::npos ||
      value.size() != (tensors.size() + 1) * kDigits ||
      header.compare(at, value.size(), value) != 0) {
    return std::nullopt;
  }
  header.replace(at, kDigits, std::string(kDigits, '0'));
  if (value.substr(0, kDigits) != sum_of(header)) return std::nullopt;
  const char* next = value.data() + kDigits;
  for (auto& [name, sum] : tensors) {
    const auto [end, error] = std::from_chars(next, next + kDigits, sum, 16);
    if (error != std::errc() || end != next + kDigits) return std::nullopt;
    next = end;
  }
  return tensors;
}

}  // namespace reprise::detail
