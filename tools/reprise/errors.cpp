#include "errors.h"

#include "base/nearest.h"

#include <reprise/base/bytes.h>
#include <reprise/base/error.h>
#include <reprise/memory/meter.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <regex>
#include <string_view>
#include <vector>

namespace reprise::command {
namespace {

/// Prefix of a library message and the flag that it is about.
struct Origin {
  std::string_view name;
  std::string_view flag;  // empty: no flag
};
constexpr std::array kOrigins = {
    Origin{"Schedule::parse", "--recompute"},
    Origin{"Strategy::parse", "--recompute"},
    Origin{"add_lora", "--lora-targets"},
    Origin{"config", "--resume"},
    Origin{"dataset", "--data"},
    Origin{"file", ""},
    Origin{"lora", "--adapter"},
    Origin{"make_optimizer", "--optimizer"},
    Origin{"make_schedule", "--recompute"},
    Origin{"observer", "--observe"},
    Origin{"rate_at", "--lr-schedule"},
    Origin{"results", ""},
    Origin{"safetensors", ""},
    Origin{"scale_rate", "--scale-lr"},
    Origin{"study", ""},
    Origin{"summary", "--compare"},
    Origin{"weights", "--weights"},
};

/// Prefix of library messages that are about wrong usage only if they have one of these
/// phrases.
struct UsagePhrases {
  std::string_view name;
  std::vector<std::string_view> phrases;
};
const std::array kUsagePhrases = {
    UsagePhrases{"run", {" holds "}},
    UsagePhrases{"report", {"expected a page", "not a command"}},
};

/// Hint for an unknown flag of a subcommand, which the flag completes.
struct FlagHint {
  std::string_view name;
  std::string hint;
};
const std::array kFlagHints = {
    FlagHint{"launch",
             "; flags of train come after --, as in launch -n 2 -- train "},
};

/// Returns the prefix of a message, such as "--batch" for "[--batch] expected
/// …"; empty if it has none.
std::string_view origin_of(std::string_view what) {
  const size_t end = what.find("] ");
  const bool has = what.starts_with("[") && end != std::string_view::npos;
  return has ? what.substr(1, end - 1) : std::string_view();
}

/// Returns the entry of a table; null if there is none.
template <class Table>
const typename Table::value_type* find_by_name(const Table& table,
                                               std::string_view name) {
  const auto found =
      std::find_if(table.begin(), table.end(),
                   [&](const auto& one) { return one.name == name; });
  return found == table.end() ? nullptr : &*found;
}

const CLI::App& chosen_command(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app : *chosen.front();
}

std::vector<std::string> flags_of(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back(name);
  }
  return names;
}

std::string near_flag(const std::string& flag, const CLI::App& command) {
  const std::string near = nearest(flag, flags_of(command));
  return near.empty() ? "" : "; did you mean --" + near + "?";
}

/// Returns the message for an unknown subcommand.
std::string unknown_subcommand(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands({})) {
    names.push_back(sub->get_name());
  }
  const auto words = app.remaining(/*recurse=*/true);
  const std::string expected =
      fmt::format("expected a subcommand: {}", fmt::join(names, ", "));
  if (words.empty()) return expected;
  if (words.front().starts_with("-")) {
    return fmt::format("{}, before {}", expected, words.front());
  }
  const std::string hint = did_you_mean(words.front(), names);
  return hint.empty()
             ? fmt::format("{}; got '{}'", expected, words.front())
             : fmt::format("unknown subcommand '{}'{}", words.front(), hint);
}

std::vector<std::string>::const_iterator first_flag(
    const std::vector<std::string>& words) {
  return std::find_if(words.begin(), words.end(), [](const std::string& word) {
    return word.starts_with("-") && word != "--";
  });
}

/// Returns the message for the first unknown flag, or else the first unexpected
/// argument.
std::string unexpected_word(const CLI::App& app, const CLI::App& command) {
  const auto words = app.remaining(/*recurse=*/true);
  if (words.empty()) return "unexpected arguments";
  const auto flagged = first_flag(words);
  const std::string& whole = flagged == words.end() ? words.front() : *flagged;
  const std::string word = whole.substr(0, whole.find('='));
  const std::string name = command.get_name();
  if (!word.starts_with("-")) {
    return fmt::format("unexpected argument '{}' for {}; flags begin with --",
                       word, name);
  }
  const std::string flag =
      word.substr(word.find_first_not_of('-') == std::string::npos
                      ? word.size()
                      : word.find_first_not_of('-'));
  std::string hint = near_flag(flag, command);
  const bool one_dash = hint == "; did you mean --" + flag + "?";
  for (const CLI::App* other : app.get_subcommands({})) {
    if (other == &command) continue;
    const auto flags = flags_of(*other);
    if (std::find(flags.begin(), flags.end(), flag) == flags.end()) continue;
    if (!one_dash) hint = "; it is a flag of " + other->get_name();
    break;
  }
  if (const auto* own = find_by_name(kFlagHints, name)) hint = own->hint + word;
  return fmt::format("unknown flag {} for {}{}", word, name, hint);
}

/// Returns the option that a CLI11 message names; null if it names none.
const CLI::Option* option_in(const CLI::App& command, const std::string& text) {
  const CLI::Option* best = nullptr;
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_name();
    const bool longer =
        best == nullptr || name.size() > best->get_name().size();
    if (longer && text.find(name) != std::string::npos) best = option;
  }
  return best;
}

std::string wrong_count(const CLI::Option& option) {
  const auto got = option.count();
  const auto expected = static_cast<size_t>(option.get_items_expected_min());
  if (got > expected && expected > 0) {
    return fmt::format("{}: given more than once", option.get_name());
  }
  return fmt::format("{}: expected {}, got {}", option.get_name(),
                     expected > 1 ? fmt::format("{} values", expected)
                                  : std::string("a value"),
                     got > 0 ? std::to_string(got) : "none");
}

std::string missing_option(const CLI::Option& option) {
  if (!option.get_positional()) {
    return fmt::format("{} is required: {}", option.get_name(),
                       option.get_description());
  }
  return fmt::format("expected {}: {}", option.get_type_name(),
                     option.get_description());
}

}  // namespace

std::string user_message(const std::string& what) {
  std::string text = what.substr(0, what.find('\n'));
  for (const char* end : {"Exception raised from", " [json.exception"}) {
    text.resize(std::min(text.size(), text.find(end)));
  }
  const std::string_view origin = origin_of(text);
  if (origin.empty()) return text;
  const std::string rest = text.substr(origin.size() + 3);
  if (origin.starts_with("--")) return fmt::format("{}: {}", origin, rest);
  if (origin.starts_with("model")) return fmt::format("--{}: {}", origin, rest);
  if (origin.starts_with("Schedule '")) return "--recompute: " + rest;
  const Origin* known = find_by_name(kOrigins, origin);
  if (known == nullptr || known->flag.empty()) return rest;
  return fmt::format("{}: {}", known->flag, rest);
}

std::string user_message(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  if (torch_error == nullptr) return user_message(std::string(error.what()));
  const std::string what = torch_error->what_without_backtrace();
  if (!is_out_of_memory(*torch_error) || !origin_of(what).empty()) {
    return user_message(what);
  }
  const std::string remedy =
      "; try a smaller --batch, --recompute all, or a budget with --memory";
  static const std::regex bytes("allocate ([0-9]+) bytes");
  std::smatch found;
  if (std::regex_search(what, found, bytes) && found[1].length() < 19) {
    return fmt::format("out of memory: {} could not be allocated{}",
                       format_bytes(std::stoll(found[1])), remedy);
  }
  return user_message(what) + remedy;
}

bool is_wrong_usage(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const bool ours = dynamic_cast<const Error*>(&error) != nullptr;
  if (torch_error == nullptr && !ours) return false;
  const std::string what =
      ours ? error.what() : torch_error->what_without_backtrace();
  // An infeasible budget and a full disk are not wrong usage.
  if (!ours && is_out_of_memory(*torch_error)) return false;
  const auto says = [&](std::string_view part) {
    return what.find(part) != std::string::npos;
  };
  const std::string_view origin = origin_of(what);
  if (origin == "--out")
    return true;  // a directory that was named for a new run
  if (says("cannot write") || says("cannot make") || says("another process")) {
    return false;
  }
  if (origin.starts_with("--") || origin.starts_with("model") ||
      origin.starts_with("Schedule '")) {
    return true;
  }
  if (const auto* own = find_by_name(kUsagePhrases, origin)) {
    return std::any_of(own->phrases.begin(), own->phrases.end(), says);
  }
  return find_by_name(kOrigins, origin) != nullptr;
}

std::string parse_message(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = chosen_command(app);
  const std::string what = error.what();
  if (&command == &app) {
    // Of the command itself, only --format has a value.
    const bool wrong_value =
        dynamic_cast<const CLI::ValidationError*>(&error) != nullptr;
    return wrong_value ? what : unknown_subcommand(app);
  }
  // Report unknown flags first, because they may be why another one is missing.
  const auto words = app.remaining(/*recurse=*/true);
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr ||
      first_flag(words) != words.end()) {
    return unexpected_word(app, command);
  }
  const CLI::Option* option = option_in(command, what);
  if (option == nullptr) return what;
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    return wrong_count(*option);
  }
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
    return missing_option(*option);
  }
  if (dynamic_cast<const CLI::ConversionError*>(&error) != nullptr) {
    return fmt::format("{}: takes no value but true or false",
                       option->get_name());
  }
  return what;
}

std::string help_command(const CLI::App& app) {
  const CLI::App& command = chosen_command(app);
  return &command == &app
             ? "reprise --help"
             : fmt::format("reprise {} --help", command.get_name());
}

}  // namespace reprise::command
