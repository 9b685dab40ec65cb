#pragma once

#include <string>

namespace reprise::command {

/// Of this project, such as 0.1.0.
std::string version();

}  // namespace reprise::command
