// Values of fields as text and as JSON.
// Tested by tests/train/config/fields_test.cpp.
#include "base/json_text.h"
#include "base/text_check.h"

#include <reprise/base/bytes.h>
#include <reprise/base/error.h>
#include <reprise/train/fields.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstdlib>

namespace reprise::detail {
namespace {

using nlohmann::json;

json json_value(const FieldValue& value) {
  const bool given = !value.info->absent_if_unset || !value.text.empty();
  if (!given) return nullptr;
  switch (value.info->kind) {
    case FieldKind::kFlag:
    case FieldKind::kInteger:
    case FieldKind::kReal:
    case FieldKind::kBytes:
      return json::parse(value.text);
    case FieldKind::kText:
    case FieldKind::kChoice:
      break;
  }
  return value.text;
}

bool has_type(const json& value, FieldKind kind) {
  switch (kind) {
    case FieldKind::kFlag:
      return value.is_boolean();
    case FieldKind::kInteger:
    case FieldKind::kBytes:
      return value.is_number_integer();
    case FieldKind::kReal:
      return value.is_number();
    case FieldKind::kText:
    case FieldKind::kChoice:
      break;
  }
  return value.is_string();
}

template <class T>
bool read_digits(const std::string& text, T& value) {
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  return error == std::errc{} && rest == end;
}

/// Refuses `text` in the words of the field's own check, or else of `kind`.
[[noreturn]] void refuse_text(const FieldInfo& field, const std::string& text,
                              const char* expected) {
  std::string error = field.check ? field.check(text) : "";
  if (error.empty()) {
    error = fmt::format("expected {}, got {}", expected, in_quotes(text));
  }
  refuse(field, error);
}

}  // namespace

void refuse(const FieldInfo& field, const std::string& error) {
  TORCH_CHECK(false, "[--", field.name, "] ", error);
}

std::string integer_text(int64_t value) {
  return fmt::format("{}", value);
}

std::string integer_text(uint64_t value) {
  return fmt::format("{}", value);
}

std::string real_text(double value) {
  return fmt::format("{}", value);
}

int64_t parse_integer(const FieldInfo& field, const std::string& text,
                      int64_t low, int64_t high) {
  int64_t value = 0;
  if (!read_digits(text, value) || value < low || value > high) {
    refuse_text(field, text, "a whole number");
  }
  return value;
}

uint64_t parse_unsigned(const FieldInfo& field, const std::string& text) {
  uint64_t value = 0;
  if (!read_digits(text, value)) {
    refuse_text(field, text, "a whole number of 0 or more");
  }
  return value;
}

int64_t parse_size(const FieldInfo& field, const std::string& text) {
  try {
    return parse_bytes(text);
  } catch (const Error& error) {
    refuse(field, without_origin(error.what()));
  }
}

double parse_real(const FieldInfo& field, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0') refuse_text(field, text, "a number");
  return value;
}

bool parse_flag(const FieldInfo& field, const std::string& text) {
  for (const bool value : {false, true}) {
    if (text == value_text(value)) return value;
  }
  refuse_text(field, text, "true or false");
}

FieldCheck choice_check(std::vector<std::string> names) {
  return one_of(std::move(names));
}

void check_value(const FieldValue& value) {
  // Text is recorded as JSON.
  if (value.info->kind == FieldKind::kText && !is_utf8(value.text)) {
    refuse(*value.info, "expected text in UTF-8, got other bytes");
  }
  const std::string error =
      value.info->check ? value.info->check(value.text) : "";
  if (!error.empty()) refuse(*value.info, error);
}

std::string to_json(const std::vector<FieldValue>& values) {
  nlohmann::ordered_json result = nlohmann::ordered_json::object();
  for (const FieldValue& value : values) {
    result[value.info->name] = json_value(value);
  }
  return result.dump(2);
}

std::map<std::string, std::string> from_json(
    const std::string& text, const std::vector<const FieldInfo*>& fields) {
  const json source = parse_json(text);
  TORCH_CHECK(source.is_object(),
              "[config] expected the configuration of a run as a JSON object; "
              "the file is corrupt or was written by another program");
  std::map<std::string, std::string> values;
  for (const FieldInfo* field : fields) {
    const auto found = source.find(field->name);
    if (found == source.end()) {
      TORCH_CHECK(!field->same_on_resume || field->absent_if_unset,
                  "[config] expected the configuration of a run, got one "
                  "without '",
                  field->name, "'");
      continue;
    }
    TORCH_CHECK(has_type(*found, field->kind),
                "[config] expected the configuration of a run, got one with "
                "another type of '",
                field->name, "'");
    values[field->name] =
        found->is_string() ? found->get<std::string>() : found->dump();
  }
  return values;
}

std::string difference(const FieldValue& before, const FieldValue& after) {
  return fmt::format("{} was {}, now {}", before.info->name,
                     json_value(before).dump(), json_value(after).dump());
}

}  // namespace reprise::detail
