#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace reprise {

/// The name nearest to `word` by edits of single letters; empty where none is
/// near enough to be what was meant.
std::string nearest(std::string_view word,
                    const std::vector<std::string>& names);

}  // namespace reprise
