#include "field_flags.h"

#include <reprise/base/bytes.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

namespace reprise::command {
namespace {

constexpr const char* kCheck = "field";  // name of the validators

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

}  // namespace

CLI::Option* set_check(CLI::Option* option, FieldCheck check) {
  CLI::Validator* known = nullptr;
  try {
    known = option->get_validator(kCheck);
  } catch (const CLI::OptionNotFound&) {
    return option->check(std::move(check), "", kCheck);
  }
  known->operation(
      [check = std::move(check)](std::string& text) { return check(text); });
  return option;
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
  if (!value.empty()) option->default_str(shown_default(field, value));
  if (field.check) {
    set_check(option, field.kind == FieldKind::kBytes ? with_unit(field.check)
                                                      : field.check);
  }
  return option;
}

}  // namespace reprise::command
