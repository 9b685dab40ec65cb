#pragma once

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

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

/// The same; if memory ran out, how much was asked for and what to try.
std::string user_message(const c10::Error& error);

/// Whether the error is in a value, a file or a combination of flags that the user
/// gave, rather than a failure of the work itself.
bool is_wrong_usage(const c10::Error& error);

/// What CLI11 found wrong in the command line, with the nearest known name.
std::string parse_message(const CLI::App& app, const CLI::ParseError& error);

/// "reprise train --help", of the subcommand that was chosen.
std::string help_command(const CLI::App& app);

}  // namespace reprise::command
