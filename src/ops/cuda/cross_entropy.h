#pragma once

#include "dtype.h"
#include "kernel.h"

#include <cstdint>

/// CUDA kernels of ops::linear_cross_entropy() for float16 and bfloat16 scores: one pass
/// over the scores each way, or one pass for both. No atomics but the count of correct
/// predictions: results are reproducible bit for bit. Tested by
/// tests/ops/half_cross_entropy_test.cpp and tests/ops/loss_test.cpp.
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
  float* log_sum_exp = nullptr;  ///< (rows); infinity if the target is ignored
  /// (rows): log-softmax of the target's class; 0 if the target is ignored.
  float* target_log_prob = nullptr;
  /// Incremented by the number of rows whose target has the largest score, the first one
  /// of equal scores; may be null.
  int64_t* correct = nullptr;
};
REPRISE_KERNEL(cross_entropy_forward, CrossEntropyForward);

struct CrossEntropyBackward {
  ScoresShape shape{};
  /// Overwritten with softmax - onehot(target). Padding and ignored rows become 0.
  void* scores = nullptr;
  const int64_t* targets = nullptr;
  int64_t ignore_index = -100;
  const float* log_sum_exp = nullptr;
  const float* target_log_prob = nullptr;
};
REPRISE_KERNEL(cross_entropy_backward, CrossEntropyBackward);

/// Both at once: the outputs of cross_entropy_forward(), the same bit for bit, and then
/// `scores` is overwritten as by cross_entropy_backward(). Scores are read and written once
/// if a row fits into the shared memory of a thread block, or of a cluster of up to eight
/// blocks from compute capability 9.0 on; otherwise this runs the two kernels above.
struct CrossEntropyGradient {
  ScoresShape shape{};
  void* scores = nullptr;
  const int64_t* targets = nullptr;
  int64_t ignore_index = -100;
  float* log_sum_exp = nullptr;
  float* target_log_prob = nullptr;
};
REPRISE_KERNEL(cross_entropy_gradient, CrossEntropyGradient);

}  // namespace reprise::detail::kernels
