#pragma once

#include <reprise/train/optimizer.h>

#include <nlohmann/json.hpp>

#include <fstream>

/// Expected values for tests of optimizers.
namespace reprise::testing {

/// Returns the output of fixtures/make_optimizer_values.py.
inline const nlohmann::json& optimizer_values() {
  static const nlohmann::json values = [] {
    std::ifstream file(REPRISE_FIXTURES "/optimizer_values.json");
    return nlohmann::json::parse(file);
  }();
  return values;
}

inline NamedTensors copy_of(const NamedTensors& tensors) {
  NamedTensors copies;
  for (const auto& [name, tensor] : tensors) {
    copies.emplace_back(
        name, tensor.detach().clone().requires_grad_(tensor.requires_grad()));
  }
  return copies;
}

}  // namespace reprise::testing
