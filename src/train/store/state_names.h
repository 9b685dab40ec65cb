#pragma once

#include <string>
#include <vector>

/// Names of the files of states, and what is done with whole states at once. A state that is
/// not whole is set aside: its files get the ending ".broken", which nothing reads. Tested by
/// tests/train/store/state_files_test.cpp.
namespace reprise::detail {

/// Path of the file of rank 0, which names the state.
std::string state_path(const std::string& directory, int64_t step,
                       int64_t micro);

/// Path of the part of another rank, from that of the state.
std::string part_path(const std::string& state, int rank);

/// Paths of the states in `directory`, oldest first.
std::vector<std::string> states_in(const std::string& directory);

/// Paths of the parts of a state that are there.
std::vector<std::string> parts_of(const std::string& state);

/// Paths of the files in `directory` that were set aside.
std::vector<std::string> set_aside_in(const std::string& directory);

/// Paths of the files in `directory` that belong to no state: parts without the file of
/// rank 0, which a killed process has left, and temporary files.
std::vector<std::string> remains_in(const std::string& directory);

/// Renames the files of a state, so that it is not read again. Returns the new path of the
/// file of rank 0. Throws reprise::Error if the system refuses.
std::string set_aside(const std::string& state);

/// Removes the files of a state. Throws reprise::Error if the system refuses.
void remove_state(const std::string& state);

}  // namespace reprise::detail
