#pragma once

#include <reprise/recompute/stage.h>

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Tensors between two stages, as an execution holds them. Tested by
/// tests/recompute/execution_test.cpp and tests/recompute/execution_errors_test.cpp.
namespace reprise::detail {

/// A boundary that the execution holds.
struct Boundary {
  Tensors tensors;
  std::vector<bool> requires_grad;
  std::vector<int64_t> versions;
  // Keeps them counted by the meter.
  std::vector<std::shared_ptr<void>> counted;

  Boundary(Tensors list, std::vector<bool> needs_grad);

  /// Throws c10::Error if a tensor was modified in place since. `stage` takes it as input, `what`
  /// says when that happened.
  void check_unchanged(const std::string& stage, const char* what) const;
};

/// Properties that a recomputed output must share with the first one.
struct TensorShape {
  std::vector<int64_t> sizes;
  std::optional<torch::TensorOptions> options;  // empty if undefined

  explicit TensorShape(const torch::Tensor& tensor);

  bool operator==(const TensorShape& other) const;
};

/// Throws c10::Error unless a stage `returned` the same as `before` when it was recomputed.
void check_same_shapes(const std::string& stage,
                       const std::vector<TensorShape>& before,
                       const std::vector<TensorShape>& returned);

std::vector<bool> which_require_grad(const Tensors& tensors);

Tensors detach_all(const Tensors& tensors);

/// Bytes of the tensors that are defined.
int64_t bytes_of(const Tensors& tensors);

}  // namespace reprise::detail
