#pragma once

#include <string>

namespace reprise {

/// Version of Reprise, such as "0.1.0".
std::string version();

/// Version of the LibTorch that Reprise was built with, such as "1.13.1".
std::string libtorch_version();

}  // namespace reprise
