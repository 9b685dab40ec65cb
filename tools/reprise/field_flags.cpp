#include "field_flags.h"

#include <reprise/base/bytes.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sstream>
#include <utility>

namespace reprise::command {
namespace {

// Names of the validators. That of the words is inactive, so that it checks nothing and
// --help does not show it; its description has one word per line.
constexpr const char* kCheck = "field";
constexpr const char* kWords = "words";

/// Smallest size in bytes; a smaller number probably lacks its unit.
constexpr int64_t kLeastSize = 1024;

std::string shown_default(const FieldInfo& field, const std::string& value) {
  if (value.empty() || field.kind != FieldKind::kBytes) return value;
  return format_bytes(std::stoll(value));
}

FieldCheck with_unit(FieldCheck check) {
  return [check = std::move(check),
          least = byte_size(kLeastSize)](const std::string& text) {
    const std::string error = least(text);
    return error.empty() ? check(text) : error;
  };
}

/// Returns the validator with this name; null if there is none.
CLI::Validator* find_validator(CLI::Option& option, const char* name) {
  try {
    return option.get_validator(name);
  } catch (const CLI::OptionNotFound&) {
    return nullptr;
  }
}

}  // namespace

CLI::Option* set_check(CLI::Option* option, FieldCheck check) {
  CLI::Validator* known = find_validator(*option, kCheck);
  if (known == nullptr) return option->check(std::move(check), "", kCheck);
  known->operation(
      [check = std::move(check)](std::string& text) { return check(text); });
  return option;
}

CLI::Option* set_words(CLI::Option* option,
                       const std::vector<std::string>& words) {
  const std::string lines = fmt::format("{}", fmt::join(words, "\n"));
  if (CLI::Validator* known = find_validator(*option, kWords)) {
    known->description(lines);
    return option;
  }
  CLI::Validator validator(lines);
  validator.active(false);
  return option->check(std::move(validator), kWords);
}

std::vector<std::string> words_of(CLI::Option& option) {
  const CLI::Validator* known = find_validator(option, kWords);
  if (known == nullptr) return {};
  CLI::Validator shown = *known;
  std::istringstream lines(shown.active(true).get_description());
  std::vector<std::string> words;
  for (std::string word; std::getline(lines, word);) words.push_back(word);
  return words;
}

std::string metavar_of(const FieldInfo& field) {
  if (!field.metavar.empty()) return field.metavar;
  switch (field.kind) {
    case FieldKind::kFlag:
      return "";
    case FieldKind::kInteger:
      return "INT";
    case FieldKind::kReal:
      return "FLOAT";
    case FieldKind::kBytes:
      return "SIZE";
    case FieldKind::kText:
      return "TEXT";
    case FieldKind::kChoice:
      return fmt::format("{}", fmt::join(field.choices, "|"));
  }
  return "";
}

CLI::Option* add_field(CLI::App& app, const FieldInfo& field,
                       const std::string& value,
                       std::function<void(const std::string&)> set) {
  const bool flag = field.kind == FieldKind::kFlag;
  CLI::Option* option = app.add_option(
      "--" + field.name,
      CLI::callback_t(
          [flag, set = std::move(set)](const CLI::results_t& words) {
            bool on = false;
            if (flag && !CLI::detail::lexical_cast(words.back(), on))
              return false;
            set(flag ? (on ? "true" : "false") : words.back());
            return true;
          }),
      field.help);
  option->group(field.group.empty() ? "Options" : field.group);
  if (flag) {
    return option->expected(0)->multi_option_policy(
        CLI::MultiOptionPolicy::TakeLast);
  }
  option->type_name(metavar_of(field));
  if (!field.choices.empty()) set_words(option, field.choices);
  if (!value.empty()) option->default_str(shown_default(field, value));
  if (field.check) {
    set_check(option, field.kind == FieldKind::kBytes ? with_unit(field.check)
                                                      : field.check);
  }
  return option;
}

}  // namespace reprise::command
