#include "command_tree.h"

#include "field_flags.h"

#include <algorithm>
#include <string_view>

namespace reprise::command {
namespace {

/// Whether one of the alternatives of a placeholder such as "NAME|PATH" is `word`.
bool has_alternative(std::string_view placeholder, std::string_view word) {
  while (true) {
    const size_t end = placeholder.find('|');
    if (placeholder.substr(0, end) == word) return true;
    if (end == std::string_view::npos) return false;
    placeholder.remove_prefix(end + 1);
  }
}

/// Replaces "every:K" by "every:", which the user completes.
std::vector<std::string> stems(std::vector<std::string> words) {
  for (std::string& word : words) {
    const size_t colon = word.find(':');
    if (colon != std::string::npos) word.resize(colon + 1);
  }
  return words;
}

FlagEntry describe(CLI::Option& option) {
  FlagEntry entry;
  for (const auto& name : option.get_snames())
    entry.names.push_back("-" + name);
  for (const auto& name : option.get_lnames()) {
    entry.names.push_back("--" + name);
  }
  entry.help = option.get_description();
  entry.group = option.get_group();
  entry.required = option.get_required();
  entry.values = option.get_items_expected_min();
  entry.optional_value =
      entry.values == 0 && option.get_items_expected_max() > 0;
  if (entry.values == 0 && !entry.optional_value) return entry;
  entry.placeholder = option.get_type_name();
  entry.default_value = option.get_default_str();
  entry.words = stems(words_of(option));
  const auto takes = [&](const char* word) {
    return has_alternative(entry.placeholder, word);
  };
  entry.takes_files = takes("FILE") || takes("PATH");
  entry.takes_directories = takes("DIR") || takes("PATH");
  return entry;
}

CommandEntry describe_one(CLI::App& app) {
  CommandEntry entry{
      app.get_name(), app.get_description(), app.get_footer(), {}, {}};
  for (CLI::Option* option : app.get_options()) {
    FlagEntry flag = describe(*option);
    (option->get_positional() ? entry.arguments : entry.flags)
        .push_back(std::move(flag));
  }
  return entry;
}

}  // namespace

CommandTree describe(CLI::App& app) {
  CommandTree tree{describe_one(app), {}};
  for (CLI::App* subcommand : app.get_subcommands({})) {
    tree.subcommands.push_back(describe_one(*subcommand));
  }
  return tree;
}

std::string short_help(const std::string& help) {
  size_t end = help.size();
  for (const char* stop : {"\n", "; ", ": ", ":\n", " ("}) {
    end = std::min(end, help.find(stop));
  }
  return help.substr(0, end);
}

}  // namespace reprise::command
