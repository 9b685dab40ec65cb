#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace reprise {

/// Formats a size as "1.50 GiB" or "640 B", with three significant digits from 1 KiB on.
std::string format_bytes(int64_t bytes);

/// Parses a size such as "8GiB", "8000MB", "1.5 TiB" or "4096". KiB, MiB, GiB and TiB are
/// powers of 1024; kB, MB, GB and TB are powers of 1000. Case does not matter. A number
/// without a unit is in bytes. Throws reprise::Error on anything else, including negative
/// sizes and a bare K, M, G or T, which is ambiguous.
int64_t parse_bytes(std::string_view text);

}  // namespace reprise
