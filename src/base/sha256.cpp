#include "base/sha256.h"

#include "base/throw_error.h"

#include <bit>
#include <cerrno>
#include <cstring>
#include <sys/random.h>

namespace reprise {
namespace {

constexpr size_t kBlockBytes = 64;

/// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1,
    0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
    0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

class Hash {
 public:
  void add(std::string_view bytes) {
    length_ += bytes.size();
    for (const char c : bytes) {
      block_[filled_++] = static_cast<uint8_t>(c);
      if (filled_ == kBlockBytes) compress();
    }
  }

  Sha256 finish() {
    const uint64_t bits = 8 * length_;
    add(std::string_view("\x80", 1));
    while (filled_ != kBlockBytes - 8) add(std::string_view("\0", 1));
    for (int shift = 56; shift >= 0; shift -= 8) {
      block_[filled_++] = static_cast<uint8_t>(bits >> shift);
    }
    compress();
    Sha256 result;
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return result;
  }

 private:
  void compress() {
    std::array<uint32_t, 64> w{};
    for (size_t t = 0; t < 16; ++t) {
      for (size_t i = 0; i < 4; ++i) w[t] = w[t] << 8 | block_[4 * t + i];
    }
    for (size_t t = 16; t < 64; ++t) {
      const uint32_t a = w[t - 15], b = w[t - 2];
      w[t] = w[t - 16] + w[t - 7] +
             (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (size_t t = 0; t < 64; ++t) {
      const uint32_t t1 =
          h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
          ((e & f) ^ (~e & g)) + kRound[t] + w[t];
      const uint32_t t2 =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) +
          ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1;
      d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<uint32_t, 8> added = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < state_.size(); ++i) state_[i] += added[i];
    filled_ = 0;
  }

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372,
                                    0xa54ff53a, 0x510e527f, 0x9b05688c,
                                    0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, kBlockBytes> block_{};
  size_t filled_ = 0;
  uint64_t length_ = 0;
};

}  // namespace

Sha256 sha256(std::string_view message) {
  Hash hash;
  hash.add(message);
  return hash.finish();
}

Sha256 hmac_sha256(std::string_view key, std::string_view message) {
  std::string block(key);
  if (key.size() > kBlockBytes) block = bytes_of(sha256(key));
  block.resize(kBlockBytes, '\0');
  const auto masked = [&](char mask) {
    std::string text = block;
    for (char& c : text) c = static_cast<char>(c ^ mask);
    return text;
  };
  Hash inner;
  inner.add(masked(0x36));
  inner.add(message);
  const Sha256 first = inner.finish();
  Hash outer;
  outer.add(masked(0x5c));
  outer.add(bytes_of(first));
  return outer.finish();
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char different = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    different |= static_cast<unsigned char>(a[i] ^ b[i]);
  }
  return different == 0;
}

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  size_t filled = 0;
  while (filled < count) {
    const ssize_t got = getrandom(bytes.data() + filled, count - filled, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      detail::throw_error("[random] the kernel gives no random bytes: {}",
                          detail::system_reason());
    }
    filled += static_cast<size_t>(got);
  }
  return bytes;
}

std::string hex_text(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    text += fmt::format("{:02x}", static_cast<unsigned char>(c));
  }
  return text;
}

}  // namespace reprise
