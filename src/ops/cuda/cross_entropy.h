#pragma once

#include "dtype.h"
#include "kernel.h"

#include <cstdint>

/// CUDA kernels of ops::linear_cross_entropy() for float16 and bfloat16 scores: one pass
/// over the scores each way. No atomics but the count of correct predictions: results are
/// reproducible bit for bit. Tested by tests/ops/loss_test.cpp.
namespace reprise::detail::kernels {

/// Rows of scores; columns from `classes` up to `stride` are padding.
struct ScoresShape {
  int64_t rows = 0;
  int64_t classes = 0;
  int64_t stride = 0;             ///< elements per row, multiple of 8
  DType type = DType::kBFloat16;  ///< bfloat16 or float16
};

struct CrossEntropyForward {
  ScoresShape shape{};
  const void* scores = nullptr;
  const int64_t* targets = nullptr;  ///< (rows)
  int64_t ignore_index = -100;
  // Outputs.
  float* log_sum_exp = nullptr;  ///< (rows)
  /// (rows): log-softmax of the target's class; of class 0 if the target is ignored.
  float* target_log_prob = nullptr;
  /// Incremented by the number of rows whose target has the largest score, the first one
  /// of equal scores; may be null.
  int64_t* correct = nullptr;
};
REPRISE_KERNEL(cross_entropy_forward, CrossEntropyForward);

struct CrossEntropyBackward {
  ScoresShape shape{};
  /// Overwritten with softmax - onehot(target); padding becomes 0. An ignored row is
  /// treated as if its target were class 0.
  void* scores = nullptr;
  const int64_t* targets = nullptr;
  int64_t ignore_index = -100;
  const float* log_sum_exp = nullptr;
  const float* target_log_prob = nullptr;
};
REPRISE_KERNEL(cross_entropy_backward, CrossEntropyBackward);

}  // namespace reprise::detail::kernels
