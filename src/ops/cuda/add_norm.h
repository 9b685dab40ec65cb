#pragma once

#include "dtype.h"
#include "kernel.h"

#include <algorithm>
#include <cstdint>

/// CUDA kernels of ops::add_norm(): the sum, its LayerNorm and the conversion to the
/// output type in one pass forward and one backward. No atomics: results are
/// reproducible bit for bit. Tested by tests/ops/add_norm_test.cpp.
namespace reprise::detail::kernels {

struct AddNormShape {
  int64_t rows = 0;
  int64_t columns = 0;                 ///< multiple of 4, at most kMaxColumns
  DType branch = DType::kNone;         ///< kNone: nothing is added to x
  DType normalized = DType::kFloat32;  ///< of the normalized rows

  static constexpr int64_t kMaxColumns = 4096;
  static constexpr int64_t kRowsPerPart = 2;
  static constexpr int64_t kMaxParts = 1024;

  /// Number of parts that the rows are divided into for the gradients of weight and bias.
  int64_t parts() const {
    return std::clamp<int64_t>((rows + kRowsPerPart - 1) / kRowsPerPart, 1,
                               kMaxParts);
  }
  /// Number of floats of scratch memory for the backward.
  int64_t scratch_size() const { return 2 * parts() * columns; }
};

struct AddNormForward {
  AddNormShape shape{};
  const float* x = nullptr;       ///< (rows, columns)
  const void* branch = nullptr;   ///< (rows, columns) of shape.branch, or null
  const float* weight = nullptr;  ///< (columns)
  const float* bias = nullptr;    ///< (columns)
  double epsilon = 0;
  // Outputs.
  float* sum = nullptr;                ///< x + branch; null if nothing is added
  void* normalized = nullptr;          ///< (rows, columns) of shape.normalized
  float* mean = nullptr;               ///< (rows)
  float* inverse_deviation = nullptr;  ///< (rows)
};
REPRISE_KERNEL(add_norm_forward, AddNormForward);

struct AddNormBackward {
  AddNormShape shape{};
  const float* sum = nullptr;         ///< the tensor that was normalized
  const void* dnormalized = nullptr;  ///< gradient of the normalized rows
  const float* dsum =
      nullptr;  ///< gradient of the sum from other uses, or null
  const float* weight = nullptr;
  const float* mean = nullptr;
  const float* inverse_deviation = nullptr;
  float* scratch = nullptr;  ///< shape.scratch_size() floats
  // Outputs.
  float* dx = nullptr;      ///< also the gradient of a float32 branch
  void* dbranch = nullptr;  ///< written if the branch is float16 or bfloat16
  float* dweight = nullptr;
  float* dbias = nullptr;
};
REPRISE_KERNEL(add_norm_backward, AddNormBackward);

}  // namespace reprise::detail::kernels
