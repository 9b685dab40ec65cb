#include "base/json_text.h"

#include "base/text_check.h"

#include <fmt/format.h>

namespace reprise {

std::string why_not_parsed(std::string_view text, const JsonLimits& limits) {
  size_t depth = 0, values = 1;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;  // the next character is no end of the string
      if (c == '"') in_string = false;
      continue;
    }
    switch (c) {
      case '"':
        in_string = true;
        break;
      case '{':
      case '[':
        ++values;  // its first one
        if (++depth > limits.depth) {
          return fmt::format("values nested more than {} deep", limits.depth);
        }
        break;
      case '}':
      case ']':
        if (depth > 0) --depth;
        break;
      case ',':
        ++values;
        break;
      default:
        break;
    }
    if (values > limits.values) {
      return fmt::format("more than {} values", limits.values);
    }
  }
  return "";
}

std::string shown_json(const nlohmann::json& value) {
  return shortened(
      value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
      100);
}

}  // namespace reprise
