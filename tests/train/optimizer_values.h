#pragma once

#include <nlohmann/json.hpp>

#include <fstream>

namespace reprise::testing {

/// What fixtures/make_optimizer_values.py wrote.
inline const nlohmann::json& optimizer_values() {
  static const nlohmann::json values = [] {
    std::ifstream file(REPRISE_FIXTURES "/optimizer_values.json");
    return nlohmann::json::parse(file);
  }();
  return values;
}

}  // namespace reprise::testing
