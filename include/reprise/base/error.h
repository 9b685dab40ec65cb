#pragma once

#include <stdexcept>

namespace reprise {

/// Thrown by the functions that do not depend on LibTorch: sizes, files and processes.
/// what() is one line that names the file or the value, and the system's reason if there
/// is one. Everything else reports errors as c10::Error.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace reprise
