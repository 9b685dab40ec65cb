#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace reprise {

/// "1.50 GiB", "640 B"; three significant figures from KiB on.
std::string format_bytes(int64_t bytes);

/// Reads "8GiB", "8000MB", "1.5 G", "4096": binary units with or without the
/// `i`-less short form K, M, G, T; KB, MB, GB, TB are powers of 1000. No unit
/// means bytes. Throws c10::Error on anything else, and on a negative size.
int64_t parse_bytes(std::string_view text);

}  // namespace reprise
