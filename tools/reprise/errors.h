#pragma once

#include <CLI/CLI.hpp>

#include <exception>
#include <string>

/// Errors as the user of the command reads them: one line that names the flag, what
/// was expected, what was given and what to change.
namespace reprise::command {

constexpr int kDone = 0;
constexpr int kFailed = 1;
constexpr int kWrongUsage = 2;
constexpr int kInterrupted = 130;  // 128 + SIGINT

/// Last line of the help.
constexpr const char* kStatuses =
    "Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.";

/// The first line of a library's message, with the flag it is about in the place of
/// the "[function] " that it begins with.
std::string user_message(const std::string& what);

/// Overload for an exception. If memory ran out, says how much was requested and what to
/// try.
std::string user_message(const std::exception& error);

/// Whether the error is in a value, a file or a combination of flags that the user
/// gave, rather than a failure of the work itself. False for exceptions that are neither
/// c10::Error nor reprise::Error.
bool is_wrong_usage(const std::exception& error);

/// What CLI11 found wrong in the command line, with the nearest known name.
std::string parse_message(const CLI::App& app, const CLI::ParseError& error);

/// "reprise train --help", of the subcommand that was chosen.
std::string help_command(const CLI::App& app);

}  // namespace reprise::command
