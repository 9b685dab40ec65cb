#pragma once

#include "kernel.h"
#include "norm_statistics.h"

#include <cstdint>

/// CUDA kernels of ops::norm_act() for contiguous images. Several blocks share a channel, so that statistics of
/// large images fill the device, and the ReLU and the max pool run in the pass that
/// applies the norm. All tensors are contiguous (N, C, H, W) in float32. No atomics:
/// results are reproducible bit for bit. Tested by tests/ops/norm_act_test.cpp.
namespace reprise::detail::kernels {

struct NormReluShape {
  int64_t samples = 0, channels = 0, height = 0, width = 0;
  /// Groups of channels, each normalized per sample (GroupNorm). 0: each channel is
  /// normalized over all samples (BatchNorm).
  int64_t groups = 0;
  bool pool = false;  ///< a 2 × 2 max pool follows the ReLU

  static constexpr int64_t kPartSize =
      16384;  ///< elements of a plane per block

  int64_t planes() const { return samples * channels; }
  int64_t plane_size() const { return height * width; }
  int64_t pooled_height() const { return height / 2; }
  int64_t pooled_width() const { return width / 2; }
  /// Number of means, and of variances.
  int64_t statistics() const {
    return groups == 0 ? channels : samples * groups;
  }
  /// Number of parts that a plane is divided into.
  int64_t parts() const { return (plane_size() + kPartSize - 1) / kPartSize; }
  /// Number of floats of scratch memory, for the forward and for the backward.
  int64_t scratch_size() const { return 2 * planes() * parts(); }
};

/// Input and statistics of a norm. The forward writes the statistics.
struct NormTensors {
  const float* x = nullptr;
  const float* weight = nullptr;       ///< (channels)
  const float* bias = nullptr;         ///< (channels)
  float* mean = nullptr;               ///< (shape.statistics())
  float* inverse_deviation = nullptr;  ///< (shape.statistics())
};

struct NormReluForward {
  NormReluShape shape{};
  NormTensors tensors{};
  RunningMoments running{};  ///< updated
  double epsilon = 0;
  float* scratch = nullptr;  ///< shape.scratch_size() floats
  // Outputs.
  float* y = nullptr;
  /// With `pool`, the position of each maximum in its window, 0 to 3; 4 if the ReLU
  /// zeroes it.
  uint8_t* positions = nullptr;
};
REPRISE_KERNEL(norm_relu_forward, NormReluForward);

struct NormReluBackward {
  NormReluShape shape{};
  NormTensors tensors{};
  const float* dy = nullptr;
  const uint8_t* positions = nullptr;  ///< with `pool`, from the forward
  float* scratch = nullptr;            ///< shape.scratch_size() floats
  float* sums = nullptr;  ///< scratch, 2 · shape.statistics() floats
  // Outputs.
  float* dx = nullptr;  ///< may be null
  float* dweight = nullptr;
  float* dbias = nullptr;
};
REPRISE_KERNEL(norm_relu_backward, NormReluBackward);

}  // namespace reprise::detail::kernels
