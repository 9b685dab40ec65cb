#pragma once

#include "kernel.h"
#include "norm_statistics.h"

#include <cstdint>

/// CUDA kernels of ops::norm_act() and ops::conv_relu() for channels-last images: what
/// applies a norm, adds a residual and activates, and the gradients. Without a norm, that
/// is, with null `mean`, the kernels add the bias of a convolution instead.
/// Tested by tests/ops/norm_act_test.cpp.
namespace reprise::detail::kernels {

enum class Activation { kNone, kRelu, kSilu };

/// Input, parameters and statistics of a norm. float32 except for x.
struct NormValues {
  const void* x = nullptr;
  const float* weight = nullptr;             ///< (channels); null: 1
  const float* bias = nullptr;               ///< (channels)
  const float* mean = nullptr;               ///< (shape.statistics()); null: 0
  const float* inverse_deviation = nullptr;  ///< (shape.statistics()); null: 1
};

/// y = act(norm(x) + residual).
struct NormActForward {
  RowsShape shape{};
  NormValues norm{};
  Activation activation = Activation::kNone;
  const void* residual = nullptr;  ///< may be null
  void* y = nullptr;               ///< output, may be x
};
REPRISE_KERNEL(norm_act_forward, NormActForward);

/// Gradient g of the norm's output, and its partial sums. Reads of x, `dy` and
///   - nothing else if there was no residual (a ReLU is recomputed from x);
///   - `y` if there was one and a ReLU followed;
///   - `residual` if SiLU followed.
/// Without a norm it reads `dy` and `y` only, not x.
struct NormActSums {
  RowsShape shape{};
  NormValues norm{};
  Activation activation = Activation::kNone;
  const void* dy = nullptr;
  const void* y = nullptr;         ///< may be null
  const void* residual = nullptr;  ///< may be null
  // Outputs.
  void* g = nullptr;         ///< null: not written; required with y or residual
  float* scratch = nullptr;  ///< partial sums for norm_sums()
};
REPRISE_KERNEL(norm_act_sums, NormActSums);

/// Gradient of x from the coefficients of norm_sums().
struct NormActBackward {
  RowsShape shape{};
  NormValues norm{};
  /// kNone if `dy` is the gradient g that norm_act_sums() wrote.
  Activation activation = Activation::kNone;
  const void* dy = nullptr;
  const float* coefficients = nullptr;
  void* dx = nullptr;  ///< output, may be dy
};
REPRISE_KERNEL(norm_act_backward, NormActBackward);

}  // namespace reprise::detail::kernels
