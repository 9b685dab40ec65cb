#pragma once

#include "column_sums.h"
#include "dtype.h"
#include "kernel.h"

#include <cstdint>

/// CUDA kernels for the activation between two linear layers, in half precision. Each is one
/// pass with accesses of 16 bytes. Computes in float32; no atomics: results are
/// reproducible bit for bit. Tested by tests/ops/feed_forward_test.cpp.
namespace reprise::detail::kernels {

enum class ActivationKind { kGeluTanh, kGeluErf, kRelu, kSilu };

/// y = activation(x)
struct ActivationForward {
  int64_t count = 0;              ///< a multiple of 8
  DType type = DType::kBFloat16;  ///< bfloat16 or float16
  ActivationKind kind = ActivationKind::kGeluTanh;
  const void* x = nullptr;  ///< aligned to 16 bytes, as all pointers here
  void* y = nullptr;
};
REPRISE_KERNEL(activation_forward, ActivationForward);

/// dx = dy · activation'(x), and sums = (add ? sums : 0) + sum of the rows of dx. Also
/// computes y again if it is not null, with the same bits as activation_forward().
struct ActivationBackward {
  ColumnSumsShape shape{};  ///< columns: a multiple of 8
  ActivationKind kind = ActivationKind::kGeluTanh;
  const void* x = nullptr;   ///< (rows, columns), contiguous
  const void* dy = nullptr;  ///< (rows, columns), contiguous
  void* dx = nullptr;        ///< may be dy
  void* y = nullptr;         ///< null: not computed
  float* scratch = nullptr;  ///< shape.scratch_size() floats
  float* sums = nullptr;     ///< (columns); null: not computed
  bool add = false;
};
REPRISE_KERNEL(activation_backward, ActivationBackward);

}  // namespace reprise::detail::kernels
