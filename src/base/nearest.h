#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace reprise {

/// The name nearest to `word`, by insertions, deletions, replacements and swaps of
/// neighbouring letters; empty if none is near enough to be what was meant. Upper
/// and lower case are equal, and so are '-' and '_'. A word of three letters or more
/// is also near to a name that it begins.
std::string nearest(std::string_view word,
                    const std::vector<std::string>& names);

/// "; did you mean NAME?" with the nearest name; empty if there is none.
std::string did_you_mean(std::string_view word,
                         const std::vector<std::string>& names);

}  // namespace reprise
