#pragma once

#include "kernel.h"
#include "norm_act.h"

#include <cstdint>

/// CUDA kernels of ops::norm_act() and ops::conv_relu() followed by a max pool of stride 2,
/// for channels-last images. The pass that normalizes also pools, so that neither the
/// norm's nor the ReLU's output exists; the backward gathers from the gradient of the
/// pooled output. Tested by tests/ops/norm_act_test.cpp.
namespace reprise::detail::kernels {

/// Windows of 2 × 2 or 3 × 3 values, two apart.
struct PoolWindow {
  int64_t kernel = 2, padding = 0;

  static constexpr int64_t kStride = 2;
  /// Position if the ReLU zeroes the maximum.
  static constexpr uint8_t kZeroed = 255;

  int64_t outputs(int64_t side) const {
    return (side + 2 * padding - kernel) / kStride + 1;
  }
};

struct NormActPoolForward {
  RowsShape shape{};  ///< of x
  NormValues norm{};
  Activation activation = Activation::kNone;  ///< or kRelu
  PoolWindow window{};
  // Outputs.
  void* y = nullptr;
  uint8_t* positions =
      nullptr;  ///< of each maximum in its window: row · kernel + column
};
REPRISE_KERNEL(norm_act_pool_forward, NormActPoolForward);

/// Partial sums as by norm_act_sums(). Without a norm it also writes the gradient of x.
struct NormActPoolSums {
  RowsShape shape{};
  NormValues norm{};
  PoolWindow window{};
  const void* dy = nullptr;
  const uint8_t* positions = nullptr;
  // Outputs.
  void* dx = nullptr;        ///< without a norm
  float* scratch = nullptr;  ///< partial sums for norm_sums()
};
REPRISE_KERNEL(norm_act_pool_sums, NormActPoolSums);

struct NormActPoolBackward {
  RowsShape shape{};
  NormValues norm{};
  PoolWindow window{};
  const void* dy = nullptr;
  const uint8_t* positions = nullptr;
  const float* coefficients = nullptr;
  void* dx = nullptr;  ///< output
};
REPRISE_KERNEL(norm_act_pool_backward, NormActPoolBackward);

}  // namespace reprise::detail::kernels
