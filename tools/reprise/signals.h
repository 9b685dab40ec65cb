#pragma once

#include <functional>

namespace reprise::command {

/// From now on SIGINT and SIGTERM are noted instead of ending the process; a
/// second one ends it at once. The function says whether one came.
std::function<bool()> stop_on_signals();

/// Exit status of a command that was stopped: 130 after SIGINT, 143 after SIGTERM,
/// as a shell shows them; 130 if the signal came to another rank.
int stopped_status();

}  // namespace reprise::command
