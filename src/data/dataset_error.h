#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace reprise::detail {

/// Throws c10::Error: the dataset file at `path` cannot be used because of `what`.
/// Tested by tests/data/idx_test.cpp.
[[noreturn]] inline void dataset_error(const std::string& path,
                                       const std::string& what) {
  TORCH_CHECK(false, "[dataset] ", path, ": ", what);
}

}  // namespace reprise::detail
