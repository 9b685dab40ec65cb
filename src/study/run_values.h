#pragma once

#include <reprise/study/study_file.h>

#include <nlohmann/json.hpp>

#include <string>
#include <utility>
#include <vector>

/// Helpers shared by the parser and the editing functions of studies. Tested by
/// tests/study/study_file_test.cpp.
namespace reprise::detail {

using Values = std::vector<std::pair<std::string, std::string>>;

/// Converts a value to JSON: numbers and booleans keep their type, anything else
/// becomes a string.
nlohmann::json typed(const std::string& text);

/// Replaces the value of `flag`, or appends it.
void assign(Values& values, const std::string& flag, const std::string& value);

/// The flags that have the same value in all `runs`, which must not be empty.
std::vector<std::string> constants_of(const std::vector<StudyRun>& runs);

}  // namespace reprise::detail
