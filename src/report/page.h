#pragma once

#include <string_view>

namespace reprise::detail {

/// The text that results replace in a page; it occurs once.
inline constexpr std::string_view kResultsPlace = "@RESULTS@";

/// The page that was built in. A build that could not make one has the reason
/// here, without a place for results.
std::string_view built_in_page();

}  // namespace reprise::detail
