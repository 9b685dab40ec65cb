#pragma once

#include <reprise/models/model.h>

#include <string>
#include <vector>

namespace reprise::testing {

/// The largest difference within a group of tensors, relative to the largest value of the
/// tensor.
struct ValueRow {
  std::string group;
  int tensors = 0;
  std::string worst;  // tensor with the largest difference
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

/// Runs one forward and backward of `model` with `strategy`, with the device and type of
/// `where`, and compares loss, gradients and buffers with the values of the original model
/// (tests/fixtures/make_model_values.py), which must have a gradient for every parameter.
/// Some gradients are zero up to rounding (biases of keys), so differences are relative to
/// at least a thousandth of the largest gradient. Moves the model to `where`; restores its
/// buffers.
ValueReport compare_values(const Model& model, const std::string& values_path,
                           const std::string& strategy,
                           const torch::TensorOptions& where);

}  // namespace reprise::testing
