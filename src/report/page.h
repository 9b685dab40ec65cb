#pragma once

#include <string_view>

namespace reprise::detail {

/// The placeholder for the results in a page. It occurs once.
inline constexpr std::string_view kResultsPlaceholder = "@RESULTS@";

/// The built-in page template. If the build could not create one, the text explains why
/// and has no placeholder. Tested by tests/report/report_test.cpp.
std::string_view built_in_page();

}  // namespace reprise::detail
