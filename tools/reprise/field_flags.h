#pragma once

#include "base/text_check.h"

#include <reprise/base/enum_text.h>
#include <reprise/train/fields.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

/// Command-line flags of configuration fields.
namespace reprise::command {

/// Validates the values of `option` with `check`. Replaces an earlier check.
CLI::Option* set_check(CLI::Option* option, FieldCheck check);

/// Sets the words that shells complete as values of `option`, besides paths if its
/// placeholder is FILE, DIR or PATH. Replaces earlier ones.
CLI::Option* set_words(CLI::Option* option,
                       const std::vector<std::string>& words);

/// Returns these words; empty if there are none.
std::vector<std::string> words_of(CLI::Option& option);

/// Returns the placeholder for a field's value in --help, such as "INT", "SIZE"
/// or "auto|on|off".
std::string metavar_of(const FieldInfo& field);

/// Adds the flag of `field`. `set` receives its value as text; `value` is the
/// default that --help shows, or empty. Values that the field does not allow
/// are rejected when the command line is parsed.
CLI::Option* add_field(CLI::App& app, const FieldInfo& field,
                       const std::string& value,
                       std::function<void(const std::string&)> set);

/// Adds a flag for each command-line field of `table` except those named in
/// `without`. The flags write to `config`, whose values are the defaults.
template <class Config>
void add_fields(CLI::App& app, const FieldTable<Config>& table, Config& config,
                const std::vector<std::string>& without = {}) {
  for (const Field<Config>& field : table) {
    const bool left_out =
        std::find(without.begin(), without.end(), field.name) != without.end();
    if (!field.on_command_line || left_out) continue;
    add_field(app, field, field.given(config) ? field.get(config) : "",
              [&config, set = field.set](const std::string& text) {
                set(config, text);
              });
  }
}

/// Adds a flag with the names of an enum as its values.
template <NamedEnum E>
CLI::Option* add_choice(CLI::App& app, const char* flag, E& value,
                        const std::string& help) {
  FieldInfo info;
  info.name = std::string(flag).substr(2);
  info.help = help;
  info.kind = FieldKind::kChoice;
  info.choices = names_of<E>();
  info.check = one_of(info.choices);
  return add_field(
      app, info, to_text(value),
      [&value](const std::string& text) { value = from_text<E>(text); });
}

}  // namespace reprise::command
