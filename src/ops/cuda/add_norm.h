#pragma once

#include "dtype.h"
#include "kernel.h"

#include <algorithm>
#include <cstdint>

/// CUDA kernels of ops::add_norm(), ops::add_rms_norm() and ops::rms_norm(): the sum, the
/// norm of its rows and the conversion to the output type in one pass forward and one
/// backward. No atomics: results are reproducible bit for bit. Tested by
/// tests/ops/add_norm_test.cpp and tests/ops/rms_norm_test.cpp.
namespace reprise::detail::kernels {

enum class NormKind {
  kLayer,  ///< LayerNorm: subtracts the mean, has a bias
  kRms,    ///< root mean square
};

struct AddNormShape {
  NormKind kind = NormKind::kLayer;
  int64_t rows = 0;
  int64_t columns = 0;                 ///< multiple of 4, at most kMaxColumns
  DType x = DType::kFloat32;           ///< of x, the sum and their gradients
  DType branch = DType::kNone;         ///< kNone: nothing is added to x
  DType normalized = DType::kFloat32;  ///< of the normalized rows
  DType weight = DType::kFloat32;      ///< of weight and bias

  /// Of the device; the number of parts of the backward depends on it.
  int64_t multiprocessors = 132;

  static constexpr int64_t kMaxColumns = 8192;
  static constexpr int64_t kRowsPerPart = 4;

  /// Blocks of the backward that a multiprocessor runs at a time.
  int64_t blocks_per_multiprocessor() const {
    if (columns > 4096) return 1;
    if (columns > 2048) return 2;
    const bool small = (columns > 512 && columns <= 768) ||
                       (columns > 1024 && columns <= 1536);
    return small ? 4 : 3;  // blocks of 192 threads, or 256
  }
  /// Number of parts that the rows are divided into for the gradients of weight and bias.
  int64_t parts() const {
    return std::clamp<int64_t>((rows + kRowsPerPart - 1) / kRowsPerPart, 1,
                               multiprocessors * blocks_per_multiprocessor());
  }
  /// Number of floats of scratch memory for the backward.
  int64_t scratch_size() const {
    return (kind == NormKind::kLayer ? 2 : 1) * parts() * columns;
  }
};

/// Pointers are aligned to four elements.
struct AddNormForward {
  AddNormShape shape{};
  const void* x = nullptr;       ///< (rows, columns) of shape.x
  const void* branch = nullptr;  ///< (rows, columns) of shape.branch, or null
  const void* weight = nullptr;  ///< (columns) of shape.weight
  const void* bias = nullptr;    ///< (columns) of shape.weight; not with kRms
  double epsilon = 0;
  // Outputs.
  void* sum = nullptr;         ///< x + branch; null if nothing is added
  void* normalized = nullptr;  ///< (rows, columns) of shape.normalized
  void* stream = nullptr;      ///< the same of shape.x; null: not written
  float* mean = nullptr;       ///< (rows); not with kRms
  float* inverse = nullptr;  ///< (rows), 1 / deviation or 1 / root mean square
};
REPRISE_KERNEL(add_norm_forward, AddNormForward);

struct AddNormBackward {
  /// `branch`: kNone also if the gradient of the branch is dx, being of its type.
  AddNormShape shape{};
  const void* sum = nullptr;          ///< the tensor that was normalized
  const void* dnormalized = nullptr;  ///< gradient of the normalized rows
  const void* dsum = nullptr;  ///< gradient of the sum from other uses, or null
  /// Whether `dsum` is the gradient of AddNormForward::stream instead.
  bool of_stream = false;
  const void* weight = nullptr;
  const float* mean = nullptr;
  const float* inverse = nullptr;
  float* scratch = nullptr;  ///< shape.scratch_size() floats
  // Outputs.
  void* dx = nullptr;
  void* dbranch = nullptr;  ///< of shape.branch; null if that is kNone
  void* dweight = nullptr;  ///< null: not computed, nor is dbias
  void* dbias = nullptr;
};
REPRISE_KERNEL(add_norm_backward, AddNormBackward);

}  // namespace reprise::detail::kernels
