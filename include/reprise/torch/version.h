#pragma once

#include <string>

/// The torch/ layer: everything that differs between LibTorch versions, or
/// between a CPU and a CUDA build of it, is here and nowhere else. Its
/// namespace is `compat`, since a namespace `torch` inside `reprise` would hide
/// LibTorch's own.
namespace reprise::compat {

/// Version of the LibTorch this library was built with, such as "1.13.1".
std::string libtorch_version();

}  // namespace reprise::compat
