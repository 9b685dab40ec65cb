#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace reprise {

/// Returns the name closest to `word` by insertions, deletions, replacements and swaps of
/// adjacent letters; empty if none is close. Case is ignored, and '-' equals '_'. A name
/// that begins with `word` is also close if `word` has at least three letters.
std::string nearest(std::string_view word,
                    const std::vector<std::string>& names);

/// "; did you mean NAME?" with the nearest name; empty if there is none.
std::string did_you_mean(std::string_view word,
                         const std::vector<std::string>& names);

}  // namespace reprise
