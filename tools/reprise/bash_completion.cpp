// Tested by tests/tools/completion_test.sh.
#include "completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

namespace reprise::command {
namespace {

/// Completes one word. The words after -- are a command line of their own, as in
/// `launch -n 2 -- train …`; bash splits words at '=' and ':'.
constexpr const char* kFunction = R"bash(
_reprise() {
  local current=${COMP_WORDS[COMP_CWORD]} command='' flag='' first=1 i found
  local values='' words='' paths=''
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; ++i)); do
    if [[ ${COMP_WORDS[i]} == -- ]]; then
      first=$((i + 1))
      [[ $first == "$COMP_CWORD" ]] || command=''
    elif [[ -z $command && " $_reprise_commands " == *" ${COMP_WORDS[i]} "* ]]; then
      command=${COMP_WORDS[i]}
    fi
  done
  if [[ $current == = ]]; then
    current='' flag=${COMP_WORDS[COMP_CWORD - 1]}
  elif [[ ${COMP_WORDS[COMP_CWORD - 1]} == = ]]; then
    flag=${COMP_WORDS[COMP_CWORD - 2]}
  elif [[ $current == : || ${COMP_WORDS[COMP_CWORD - 1]} == : ]]; then
    return  # a number, as in cuda:1
  else
    for ((i = COMP_CWORD - 1; i >= first; --i)); do
      [[ ${COMP_WORDS[i]} == -?* ]] || continue
      _reprise_value "$command" "${COMP_WORDS[i]}" || break
      ((COMP_CWORD - i > values)) || flag=${COMP_WORDS[i]}
      break
    done
  fi
  values='' words='' paths=''
  if [[ -n $flag ]]; then
    _reprise_value "$command" "$flag"
  elif [[ $current == -* ]]; then
    _reprise_flags "$command"
  elif [[ -z $command ]]; then
    words=$_reprise_commands
  else
    _reprise_value "$command" '' || [[ -n $current ]] || _reprise_flags "$command"
  fi
  while IFS= read -r found; do
    [[ -z $found ]] || COMPREPLY+=("$found")
  done < <(
    compgen -W "$words" -- "$current"
    case $paths in
      files) compgen -f -- "$current" ;;
      directories) compgen -d -- "$current" ;;
    esac
  )
  [[ -z $paths ]] || compopt -o filenames 2>/dev/null
  [[ ${#COMPREPLY[@]} != 1 || $COMPREPLY != *[=:] ]] || compopt -o nospace 2>/dev/null
}
complete -F _reprise reprise
)bash";

const char* paths_of(const FlagEntry& flag) {
  if (flag.takes_files) return "files";
  return flag.takes_directories ? "directories" : "";
}

/// Names of all flags of a command.
std::string flag_names(const CommandEntry& command) {
  std::vector<std::string> names;
  for (const FlagEntry& flag : command.flags) {
    names.insert(names.end(), flag.names.begin(), flag.names.end());
  }
  return fmt::format("{}", fmt::join(names, " "));
}

/// Collects the patterns "COMMAND FLAG" of a case statement by what they execute.
class Cases {
 public:
  void add(const std::string& command, const FlagEntry& flag) {
    if (flag.values == 0) return;
    const std::string action =
        fmt::format("values={} words='{}' paths={}", flag.values,
                    fmt::join(plain_words(flag.words), " "), paths_of(flag));
    auto names = flag.names;
    if (names.empty()) names.emplace_back();
    for (const std::string& name : names) {
      patterns_of(action).push_back(fmt::format("'{} {}'", command, name));
    }
  }

  std::string text() const {
    std::string text;
    for (const auto& [action, patterns] : cases_) {
      text += fmt::format("    {})\n      {} ;;\n",
                          fmt::join(patterns, " | \\\n      "), action);
    }
    return text;
  }

 private:
  std::vector<std::string>& patterns_of(const std::string& action) {
    for (auto& [known, patterns] : cases_) {
      if (known == action) return patterns;
    }
    return cases_.emplace_back(action, std::vector<std::string>{}).second;
  }

  std::vector<std::pair<std::string, std::vector<std::string>>> cases_;
};

}  // namespace

std::string bash_completion(const CommandTree& tree) {
  std::vector<CommandEntry> all{tree.program};
  all.front().name.clear();
  all.insert(all.end(), tree.subcommands.begin(), tree.subcommands.end());
  std::vector<std::string> names;
  Cases cases;
  std::string flags;
  for (const CommandEntry& command : all) {
    if (!command.name.empty()) names.push_back(command.name);
    flags += fmt::format("    '{}') words='{}' ;;\n", command.name,
                         flag_names(command));
    for (const auto& flag : command.flags) cases.add(command.name, flag);
    for (const auto& argument : command.arguments) {
      cases.add(command.name, argument);
    }
  }
  return fmt::format(
      "# Completion of the command reprise for bash, printed by: reprise "
      "completion bash\n\n"
      "_reprise_commands='{}'\n\n"
      "# _reprise_flags COMMAND: sets words to the flags of a subcommand.\n"
      "_reprise_flags() {{\n  case $1 in\n{}  esac\n}}\n\n"
      "# _reprise_value COMMAND FLAG: sets values, the number of values of a "
      "flag, and what\n# they can be: words and paths. Fails if it takes none. "
      "Without FLAG: an argument.\n"
      "_reprise_value() {{\n  case \"$1 $2\" in\n{}    *) return 1 ;;\n"
      "  esac\n}}\n{}",
      fmt::join(names, " "), flags, cases.text(), kFunction);
}

}  // namespace reprise::command
