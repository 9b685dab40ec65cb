#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace reprise {

using Sha256 = std::array<uint8_t, 32>;

/// SHA-256 (FIPS 180-4).
Sha256 sha256(std::string_view message);

/// HMAC-SHA-256 (RFC 2104): proves knowledge of `key` without revealing it.
Sha256 hmac_sha256(std::string_view key, std::string_view message);

/// Compares in a time that does not depend on where the values differ.
bool equal_in_constant_time(std::string_view a, std::string_view b);

/// The bytes of a hash as text of bytes, to concatenate or compare.
inline std::string_view bytes_of(const Sha256& hash) {
  return {reinterpret_cast<const char*>(hash.data()), hash.size()};
}

/// Returns `count` unpredictable bytes of the kernel. Throws reprise::Error if the
/// kernel has none.
std::string random_bytes(size_t count);

/// "0aff…", two digits per byte.
std::string hex_text(std::string_view bytes);

}  // namespace reprise
