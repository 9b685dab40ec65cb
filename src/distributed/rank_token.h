#pragma once

#include <functional>
#include <string>

namespace reprise::detail {

constexpr const char* kTokenVariable = "REPRISE_RANK_TOKEN";

/// The secret by which the ranks of one training recognize each other: the value of
/// REPRISE_RANK_TOKEN, or the contents of the file REPRISE_RANK_TOKEN_FILE, or else those
/// of a key file of this user, `rank-key` in the cache directory, which the first rank
/// creates. Throws reprise::Error if a token has less than 16 characters, or if others
/// can read its file.
///
/// `variable` returns the value of an environment variable; empty if it is not set.
std::string rank_token(const std::function<std::string(const char*)>& variable);
std::string rank_token();

/// A new token: 64 random hexadecimal digits.
std::string new_rank_token();

}  // namespace reprise::detail
