#pragma once

#include <functional>

/// Stopping a command by a signal. Tested by tests/tools/train_command_test.sh
/// and tests/train/loop/kill_test.sh.
namespace reprise::command {

/// Installs handlers that record the first SIGINT, SIGTERM or SIGHUP; a second signal
/// ends the process. SIGHUP stays ignored if it is, as by nohup. The returned function says whether a signal was received.
std::function<bool()> stop_on_signals();

/// Returns the exit status of a command that was stopped: 130 after SIGINT, 143
/// after SIGTERM, 129 after SIGHUP, as in a shell; 130 if another rank received the signal.
int stopped_status();

}  // namespace reprise::command
