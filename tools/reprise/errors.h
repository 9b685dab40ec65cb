#pragma once

#include <CLI/CLI.hpp>

#include <exception>
#include <string>

/// Error messages for users of the command: one line that names the flag, the
/// expected and the given value, and what to change. Tested by
/// tests/tools/wrong_inputs_test.py.
namespace reprise::command {

constexpr int kDone = 0;
constexpr int kFailed = 1;
constexpr int kWrongUsage = 2;
constexpr int kInterrupted = 130;  // 128 + SIGINT

/// Last line of the help text.
constexpr const char* kStatuses =
    "Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.";

/// Returns the first line of a library message, with its "[function] " prefix
/// replaced by the flag that the error is about.
std::string user_message(const std::string& what);

/// Overload for an exception. If memory ran out, the message includes the
/// requested size and what to try.
std::string user_message(const std::exception& error);

/// Returns whether the error is in a value, a file or a combination of flags
/// that the user gave, as opposed to a failure of the operation. False for
/// exceptions other than c10::Error and reprise::Error.
bool is_wrong_usage(const std::exception& error);

/// Returns the message for an error that CLI11 found in the command line, with
/// the nearest known name.
std::string parse_message(const CLI::App& app, const CLI::ParseError& error);

/// Returns the help command of the selected subcommand, such as
/// "reprise train --help".
std::string help_command(const CLI::App& app);

}  // namespace reprise::command
