// Tested by tests/tools/completion_test.sh.
#include "completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string_view>

namespace reprise::command {
namespace {

/// Helpers of the script. `_reprise_offer PATHS WORD...` completes words, and paths; words
/// that end in '=' or ':' get no space.
constexpr const char* kHelpers = R"zsh(
_reprise_offer() {
  local paths=$1
  shift
  local -a whole stems
  whole=("${(@)@:#*[:=]}")
  stems=("${(@M)@:#*[:=]}")
  compadd -a whole
  compadd -S '' -a stems
  case $paths in
    files) _files ;;
    directories) _files -/ ;;
  esac
}

_reprise() {
  local context state state_descr line command
  typeset -A opt_args
  local -i start=${words[(I)--]}
  if ((start > 0 && start + 1 < CURRENT)); then
    # The words after -- are a command line of their own.
    words=("$words[1]" "${(@)words[start + 1,-1]}")
    ((CURRENT -= start - 1))
  fi
  _arguments -C "${_reprise_program[@]}" '1: :->command' '*:: :->rest'
  case $state in
    command) _describe -t commands command _reprise_commands ;;
    rest)
      command=$words[1]
      ((CURRENT > 1)) && (($+functions[_reprise_$command])) && _reprise_$command
      ;;
  esac
}
)zsh";

/// Escapes the characters that end a part of a specification of _arguments.
std::string escaped(std::string_view text, std::string_view special) {
  std::string result;
  for (const char letter : text) {
    if (letter == '\'') {
      result += "'\\''";  // all specifications are in single quotes
      continue;
    }
    if (special.find(letter) != std::string_view::npos) result += '\\';
    result += letter;
  }
  return result;
}

/// The part of a specification that says what the value is: ":message:action".
std::string value_of(const FlagEntry& flag) {
  const auto words = plain_words(flag.words);
  const char* paths = flag.takes_files         ? "files"
                      : flag.takes_directories ? "directories"
                                               : "none";
  std::string action = " ";
  if (!words.empty() || flag.takes_files || flag.takes_directories) {
    action = fmt::format(" _reprise_offer {} {}", paths, fmt::join(words, " "));
  }
  return fmt::format("{}:{}:{}", flag.optional_value ? ":" : "",
                     escaped(flag.placeholder, ":\\[]"),
                     escaped(action, ":\\"));
}

/// The specification of a flag in single quotes, one per name. A flag may be repeated,
/// because the last value counts.
std::vector<std::string> specifications(const FlagEntry& flag) {
  std::vector<std::string> all;
  const std::string help = escaped(short_help(flag.help), ":\\[]");
  std::string values;
  for (int i = 0; i < flag.values; ++i)
    values += ":" + value_of(flag).substr(1);
  if (flag.optional_value) values = value_of(flag);
  if (flag.names.empty()) all.push_back(fmt::format("'*{}'", values));
  for (const std::string& name : flag.names) {
    const bool assigned = name.starts_with("--") && flag.values == 1;
    all.push_back(
        fmt::format("'*{}{}[{}]{}'", name, assigned ? "=" : "", help, values));
  }
  return all;
}

std::string lines_of(const CommandEntry& command, const char* separator) {
  std::vector<std::string> all;
  for (const auto* list : {&command.flags, &command.arguments}) {
    for (const FlagEntry& flag : *list) {
      for (auto& one : specifications(flag)) all.push_back(std::move(one));
    }
  }
  return fmt::format("{}", fmt::join(all, separator));
}

}  // namespace

std::string zsh_completion(const CommandTree& tree) {
  std::string commands, functions;
  for (const CommandEntry& command : tree.subcommands) {
    commands += fmt::format("  '{}:{}'\n", command.name,
                            escaped(short_help(command.help), ":\\"));
    functions +=
        fmt::format("_reprise_{}() {{\n  _arguments -S \\\n    {}\n}}\n\n",
                    command.name, lines_of(command, " \\\n    "));
  }
  return fmt::format(
      "#compdef reprise\n"
      "# Completion of the command reprise for zsh, printed by: reprise "
      "completion zsh\n\n"
      "typeset -ga _reprise_commands _reprise_program\n"
      "_reprise_commands=(\n{})\n_reprise_program=(\n  {}\n)\n\n{}{}\n"
      "if [[ $funcstack[1] == _reprise ]]; then\n  _reprise \"$@\"\nelse\n"
      "  compdef _reprise reprise\nfi\n",
      commands, lines_of(tree.program, "\n  "), functions, kHelpers + 1);
}

}  // namespace reprise::command
