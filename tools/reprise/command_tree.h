#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

/// The subcommands and flags of the command as data, from which the manual page and the
/// completions of shells are written. Nothing is listed by hand: all of it comes from the
/// CLI11 app, and that from the table of fields.
/// Tested by tests/tools/command_tree_test.cpp.
namespace reprise::command {

/// A flag, or an argument without a flag.
struct FlagEntry {
  std::vector<std::string> names;  ///< "-n", "--ranks"; empty: an argument
  std::string placeholder;    ///< of the value, such as "INT"; empty: no value
  std::string default_value;  ///< empty: none
  std::string help;
  std::string group;
  std::vector<std::string> words;  ///< values that shells complete
  bool takes_files = false;
  bool takes_directories = false;
  bool required = false;
  bool optional_value = false;
  int values = 0;  ///< least number of values; 0: a flag alone
};

/// A subcommand, or the command itself.
struct CommandEntry {
  std::string name;
  std::string help;
  std::string footer;
  std::vector<FlagEntry> flags;
  std::vector<FlagEntry> arguments;
};

struct CommandTree {
  CommandEntry program;
  std::vector<CommandEntry> subcommands;
};

/// Describes `app` and its subcommands.
CommandTree describe(CLI::App& app);

/// Returns the beginning of a help text that fits beside a flag in a list: up to the first
/// line break, semicolon, colon or parenthesis.
std::string short_help(const std::string& help);

}  // namespace reprise::command
