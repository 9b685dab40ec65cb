#pragma once

#include <reprise/base/error.h>

#include <fmt/format.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

namespace reprise::detail {

/// Throws reprise::Error with a message formatted as by fmt::format.
/// Tested by tests/base/error_test.cpp.
template <class... Args>
[[noreturn]] void throw_error(fmt::format_string<Args...> format,
                              Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

/// The system's text for an error number; errno by default. Safe to call from several
/// threads.
inline std::string system_reason(int number = errno) {
  return std::generic_category().message(number);
}

}  // namespace reprise::detail
