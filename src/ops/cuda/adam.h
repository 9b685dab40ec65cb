#pragma once

#include "dtype.h"
#include "kernel.h"

#include <cstdint>

/// CUDA kernel of Adam's update of many tensors in one pass, which also writes the
/// half-precision copies of the weights. Tested by tests/train/optim/optimizer_test.cpp.
namespace reprise::detail::kernels {

/// A tensor to update. All arrays have `size` elements in the same order.
struct AdamTensor {
  float* parameter = nullptr;
  const float* gradient = nullptr;
  float* mean = nullptr;    ///< first moment
  float* square = nullptr;  ///< second moment
  void* copy = nullptr;     ///< half precision; null: none
  int64_t size = 0;
  /// If not 0, the parameter is a split matrix (ops/split_weights.h) with rows of four times
  /// so many values, and stays split; `copy` must be null. At most 2^32 fours.
  unsigned split_fours = 0;
  float rate = 0;  ///< learning rate / (1 − β₁ᵗ)
  float root = 1;  ///< √(1 − β₂ᵗ)
  /// `rate`, `root` and `keep` in device memory, which a captured launch reads instead of
  /// the values here; null: none.
  const float* step_values = nullptr;
};

/// One update of up to kMaxTensors tensors, which a launch takes as a kernel argument.
struct AdamUpdate {
  static constexpr int kMaxTensors = 48;
  AdamTensor tensors[kMaxTensors];
  int count = 0;
  DType copy_type = DType::kBFloat16;  ///< of all copies
  float beta1 = 0.9F, beta2 = 0.999F, epsilon = 1e-8F;
  /// 1 − β, rounded once: in single precision 1 − 0.999 is wrong by 5e-5.
  float rest1 = 0.1F, rest2 = 0.001F;
  /// Factor of the parameter before the update: 1 − learning rate × decoupled weight decay.
  float keep = 1;
  float decay = 0;  ///< weight decay that is added to the gradient
};
REPRISE_KERNEL(adam_update, AdamUpdate);

}  // namespace reprise::detail::kernels
