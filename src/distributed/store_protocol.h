#pragma once

#include "base/sha256.h"

#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

/// What a rank and the rendezvous store say to each other over TCP.
///
///   rank → store   "RPRANK01", 32 random bytes
///   store → rank   "RPSTOR01", 32 random bytes, HMAC-SHA-256(token, "store" + both)
///   rank → store   HMAC-SHA-256(token, "rank" + both)
///
/// Each side thereby proves that it knows the token, which is never sent. Both random
/// values are new, so that a recorded proof is of no use. Nothing else is read before.
/// Then the rank sends requests, and the store replies to each: four bytes of length,
/// least significant first, and the message. Nothing is encrypted.
///
/// Tested by tests/distributed/rank_store_test.cpp.
namespace reprise::detail {

constexpr std::string_view kRankMagic = "RPRANK01";
constexpr std::string_view kStoreMagic = "RPSTOR01";
constexpr size_t kNonceBytes = 32;
constexpr size_t kProofBytes = 32;
constexpr size_t kHelloBytes = 8 + kNonceBytes;
constexpr size_t kChallengeBytes = 8 + kNonceBytes + kProofBytes;

/// Limits on what ranks send. The addresses of Gloo take 140 bytes per rank.
constexpr size_t kMostKeyBytes = 1 << 10;
constexpr size_t kMostMessageBytes = size_t{16} << 20;
constexpr size_t kMostStoredBytes = size_t{512} << 20;

/// Time for one handshake, on both sides.
constexpr std::chrono::milliseconds kHandshakeTime{5000};

enum class StoreOp : uint8_t { kSet, kGet, kAdd, kRemove, kCount };
enum class StoreReply : uint8_t { kDone, kMissing, kRefused };

inline std::string proof_of_store(std::string_view token,
                                  const std::string& nonces) {
  return std::string(bytes_of(hmac_sha256(token, "store" + nonces)));
}

inline std::string proof_of_rank(std::string_view token,
                                 const std::string& nonces) {
  return std::string(bytes_of(hmac_sha256(token, "rank" + nonces)));
}

/// Integers in messages, least significant byte first.
template <class Integer>
std::string encoded(Integer value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof value; ++i) {
    bytes += static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
  }
  return bytes;
}

template <class Integer>
Integer decoded(const char* bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(Integer); ++i) {
    value |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  return static_cast<Integer>(value);
}

/// A request: the operation, the length of the key, the key, and what belongs to the
/// operation (a value, or eight bytes).
inline std::string store_request(StoreOp op, const std::string& key,
                                 const std::string& rest = "") {
  return static_cast<char>(op) + encoded(static_cast<uint16_t>(key.size())) +
         key + rest;
}

}  // namespace reprise::detail
