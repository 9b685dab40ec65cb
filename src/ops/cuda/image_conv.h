#pragma once

#include "kernel.h"

#include <algorithm>
#include <cstdint>
#include <limits>

/// CUDA kernels of ops::image_conv(): a convolution of images with few channels, and the
/// gradients of its weight and bias. All tensors are contiguous (N, C, H, W) in float32.
/// No atomics: results are reproducible bit for bit. Tested by tests/ops/conv_test.cpp.
namespace reprise::detail::kernels {

struct ImageConvShape {
  int64_t samples = 0, channels = 0, height = 0, width = 0;
  int64_t filters = 0;
  int64_t kernel_size = 0;
  int64_t stride = 0, padding = 0;

  static constexpr int kThreads = 128;
  static constexpr int kPixels =
      4;  ///< adjacent outputs of a row per thread: a quad
  static constexpr int kFilters = 8;  ///< filters per thread
  static constexpr int kMaxChannels = 4;
  static constexpr int64_t kMaxParts = 512;

  int64_t out_height() const {
    return (height + 2 * padding - kernel_size) / stride + 1;
  }
  int64_t out_width() const {
    return (width + 2 * padding - kernel_size) / stride + 1;
  }
  int64_t quads() const {
    return samples * out_height() * ((out_width() + kPixels - 1) / kPixels);
  }
  int64_t filter_groups() const { return (filters + kFilters - 1) / kFilters; }
  /// Number of parts that the sums of the backward are divided into.
  int64_t parts() const {
    return std::clamp<int64_t>(quads() / (2 * kThreads), 1, kMaxParts);
  }
  /// Number of floats of scratch memory for the backward.
  int64_t scratch_size() const {
    return parts() * channels * filter_groups() * kFilters *
           (kernel_size * kernel_size + 1);
  }
  /// Whether the kernels support these sizes.
  bool supported() const {
    constexpr int64_t kMax = std::numeric_limits<int32_t>::max() / 2;
    return channels >= 1 && channels <= kMaxChannels &&
           (kernel_size == 2 || kernel_size == 3) &&
           (stride == 1 || stride == 2) &&
           height + 2 * padding >= kernel_size &&
           width + 2 * padding >= kernel_size && samples > 0 &&
           quads() < kMax && filter_groups() < 65536 && height * width < kMax;
  }
};

struct ImageConvForward {
  ImageConvShape shape{};
  const float* x = nullptr;
  const float* weight = nullptr;
  const float* bias = nullptr;  ///< may be null
  float* y = nullptr;           ///< output
};
REPRISE_KERNEL(image_conv_forward, ImageConvForward);

struct ImageConvBackward {
  ImageConvShape shape{};
  const float* x = nullptr;
  const float* dy = nullptr;
  float* scratch = nullptr;  ///< shape.scratch_size() floats
  // Outputs.
  float* dweight = nullptr;
  float* dbias = nullptr;  ///< may be null
};
REPRISE_KERNEL(image_conv_backward, ImageConvBackward);

}  // namespace reprise::detail::kernels
