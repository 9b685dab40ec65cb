#pragma once

#include <cstdint>

/// CUDA kernels behind lean_image_conv(): a convolution of images of few channels, and its
/// gradients but that of the images. All tensors are (N, C, H, W) in single precision,
/// contiguous. Nothing is atomic: the same input gives the same bits.
namespace reprise::kernels {

struct ImageConv {
  int64_t samples = 0, channels = 0, height = 0, width = 0;
  int64_t filters = 0;
  int64_t side = 0;  ///< of a filter
  int64_t stride = 0, padding = 0;

  int64_t out_height() const {
    return (height + 2 * padding - side) / stride + 1;
  }
  int64_t out_width() const {
    return (width + 2 * padding - side) / stride + 1;
  }
  /// Whether the kernels are for these sizes.
  bool fits() const;
  /// Values of scratch memory of the backward.
  int64_t scratch() const;
};

/// Whether this build has the kernels.
bool image_conv_kernels_built();

/// Fills `y`. `bias` may be null. `stream`: a cudaStream_t.
void image_conv_forward(const ImageConv& shape, const float* x,
                        const float* weight, const float* bias, float* y,
                        void* stream);

/// Fills the gradients of weight and bias, the latter unless null.
void image_conv_backward(const ImageConv& shape, const float* x,
                         const float* dy, float* scratch, float* dweight,
                         float* dbias, void* stream);

}  // namespace reprise::kernels
