#pragma once

#include <reprise/models/model.h>

#include <string>
#include <vector>

namespace reprise::testing {

struct SmallModel {
  std::string name;
  ModelOptions options;
};

/// All models, small enough that a step takes milliseconds.
const std::vector<SmallModel>& small_models();

/// A random batch on the device of the tests.
Tensors small_inputs(const Model& model);

}  // namespace reprise::testing
