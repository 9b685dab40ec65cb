// Tested by tests/tools/completion_test.sh.
#include "completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace reprise::command {
namespace {

/// `__reprise_at COMMAND` is true if the words before the cursor select this subcommand. The
/// words after -- are a command line of their own, which is completed as such, because fish
/// takes them for arguments.
constexpr const char* kFunctions = R"fish(
function __reprise_command
    set -l words (commandline -opc)
    set -e words[1]
    set -l command ''
    for i in (seq (count $words))
        if test "$words[$i]" = --
            test $i = (count $words)
            or set command after-dashes
            break
        else if test -z "$command"; and contains -- $words[$i] $__reprise_commands
            set command $words[$i]
        end
    end
    echo $command
end

function __reprise_at
    test (__reprise_command) = "$argv[1]"
end

function __reprise_after_dashes
    set -l words (commandline -opc)
    set -l dashes (contains -i -- -- $words)
    set -e words[1..$dashes]
    complete -C "reprise $(string join ' ' -- (string escape -- $words)) $(commandline -ct)"
end

complete -c reprise -f
complete -c reprise -n "__reprise_at after-dashes" -a "(__reprise_after_dashes)"
)fish";

/// Text in single quotes.
std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char letter : text) {
    if (letter == '\'' || letter == '\\') result += '\\';
    result += letter;
  }
  return result + "'";
}

/// What follows the names of a flag: whether it needs a value, and which ones there are.
std::string value_of(const FlagEntry& flag) {
  std::vector<std::string> offered = plain_words(flag.words);
  if (flag.takes_directories && !flag.takes_files) {
    offered.emplace_back("(__fish_complete_directories)");
  }
  std::string text;
  if (!flag.names.empty() && flag.values > 0) text += " -r";
  if (flag.takes_files) text += " -F";
  if (!offered.empty()) {
    text += fmt::format(" -a \"{}\"", fmt::join(offered, " "));
  }
  return text;
}

std::string line_of(const std::string& command, const FlagEntry& flag) {
  std::string names;
  for (const std::string& name : flag.names) {
    const bool is_long = name.starts_with("--");
    names += fmt::format(" -{} {}", is_long ? 'l' : 's',
                         name.substr(is_long ? 2 : 1));
  }
  const std::string value = value_of(flag);
  if (names.empty() && value.empty()) return "";
  return fmt::format("complete -c reprise -n \"__reprise_at '{}'\"{}{} -d {}\n",
                     command, names, value, quoted(short_help(flag.help)));
}

}  // namespace

std::string fish_completion(const CommandTree& tree) {
  std::vector<std::string> names;
  std::string commands, flags;
  for (const FlagEntry& flag : tree.program.flags) flags += line_of("", flag);
  for (const CommandEntry& command : tree.subcommands) {
    names.push_back(command.name);
    commands +=
        fmt::format("complete -c reprise -n \"__reprise_at ''\" -a {} -d {}\n",
                    command.name, quoted(short_help(command.help)));
    for (const auto* list : {&command.flags, &command.arguments}) {
      for (const FlagEntry& flag : *list) flags += line_of(command.name, flag);
    }
  }
  return fmt::format(
      "# Completion of the command reprise for fish, printed by: reprise "
      "completion fish\n\n"
      "set -g __reprise_commands {}\n{}{}{}",
      fmt::join(names, " "), kFunctions, commands, flags);
}

}  // namespace reprise::command
