#pragma once

#include <reprise/models/model.h>

#include <string>
#include <vector>

namespace reprise::testing {

/// Largest difference among a group of tensors, relative to the tensor's
/// largest value.
struct ValueRow {
  std::string group;
  int tensors = 0;
  std::string worst;  // name of the tensor
  double difference = 0;
};

struct ValueReport {
  double loss = 0;
  double expected_loss = 0;
  double loss_difference = 0;  // relative
  std::vector<ValueRow> rows;  // gradients, then buffers after the step

  double largest() const;
  std::string to_string() const;
};

/// One forward and backward of `model` by `strategy`, on the device and in the
/// precision of `where`, compared with the values
/// that the original model gave (tests/fixtures/make_model_values.py). Every
/// parameter must have a gradient there. Some gradients are zero but for
/// rounding (those of keys' biases), so nothing is taken to be smaller than a
/// thousandth of the largest gradient. In single precision, what counts is how
/// far it is off beyond twice the original's own error, where the values have
/// that: rounding decides which of thousands of ReLUs are on. The model stays where `where` puts it;
/// its buffers are put back.
ValueReport compare_values(const Model& model, const std::string& values_path,
                           const std::string& strategy,
                           const torch::TensorOptions& where);

}  // namespace reprise::testing
