#pragma once

#include <reprise/models/model.h>

#include <string>
#include <vector>

namespace reprise::testing {

struct SmallModel {
  std::string name;
  ModelOptions options;
};

/// Every model of the zoo, so small that a step takes milliseconds.
const std::vector<SmallModel>& small_models();

/// A random batch on the test's device.
Tensors small_inputs(const Model& model);

}  // namespace reprise::testing
