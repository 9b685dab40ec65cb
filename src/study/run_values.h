#pragma once

#include <reprise/study/study_file.h>

#include <nlohmann/json.hpp>

#include <string>
#include <utility>
#include <vector>

/// What reading studies and changing them share.
namespace reprise::detail {

using Values = std::vector<std::pair<std::string, std::string>>;

/// Numbers and booleans as such, anything else as a string.
nlohmann::json typed(const std::string& text);

/// Replaces the value of `flag`, or appends it.
void assign(Values& values, const std::string& flag, const std::string& value);

/// Flags that all of `runs` set alike; there must be one run or more.
std::vector<std::string> constants_of(const std::vector<StudyRun>& runs);

}  // namespace reprise::detail
