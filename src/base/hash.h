#pragma once

#include <cstdint>
#include <string_view>

namespace reprise {

/// FNV-1a, 64 bits: a short name for a long key, the same in every process and build.
/// Not cryptographic.
constexpr uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

}  // namespace reprise
