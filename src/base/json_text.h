#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <string>
#include <string_view>

/// JSON that comes from a file, of which nothing is known. The parser itself has no limits: a
/// few megabytes of brackets would exhaust the stack when the values are copied or printed.
namespace reprise {

struct JsonLimits {
  size_t depth = 64;          ///< objects and lists inside each other
  size_t values = 4'000'000;  ///< of objects and lists, together
};

/// Returns what is wrong with `text` before it is parsed: "values nested more than 64 deep".
/// Empty if it keeps the limits. Does not check anything else.
std::string why_not_parsed(std::string_view text,
                           const JsonLimits& limits = {});

/// Parses JSON. `Json` is nlohmann::json or nlohmann::ordered_json. The result is discarded,
/// as is_discarded() says, if `text` is no JSON or exceeds the limits.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, const JsonLimits& limits = {}) {
  if (!why_not_parsed(text, limits).empty()) {
    return Json(Json::value_t::discarded);
  }
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

/// A value as text for a message: shortened if it is long, with bytes that are not UTF-8
/// replaced.
std::string shown_json(const nlohmann::json& value);

}  // namespace reprise
