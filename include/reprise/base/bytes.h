#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace reprise {

/// "1.50 GiB", "640 B"; three significant figures from KiB on.
std::string format_bytes(int64_t bytes);

/// Reads "8GiB", "8000MB", "1.5 TiB", "4096". KiB, MiB, GiB and TiB are powers of
/// 1024, kB, MB, GB and TB powers of 1000, in upper or lower case; a number alone is
/// bytes. Throws c10::Error on anything else, also on a bare K, M, G or T, which
/// could mean either, and on a negative size.
int64_t parse_bytes(std::string_view text);

}  // namespace reprise
