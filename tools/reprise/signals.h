#pragma once

#include <functional>

namespace reprise::command {

/// From now on SIGINT and SIGTERM are noted instead of ending the process; a
/// second one ends it at once. The function says whether one came.
std::function<bool()> stop_on_signals();

}  // namespace reprise::command
