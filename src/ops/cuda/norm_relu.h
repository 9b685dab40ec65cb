#pragma once

#include <cstdint>

/// CUDA kernels behind lean_norm_relu(): statistics by as many blocks as the device has
/// room for, not one a channel, and no pass over the values that another one could do
/// along with its own. All tensors are (N, C, H, W) in single precision, contiguous.
/// Nothing is atomic: the same input gives the same bits.
namespace reprise::kernels {

struct NormShape {
  int64_t samples = 0, channels = 0, height = 0, width = 0;
  int64_t groups =
      0;  ///< of channels, normalised a sample; 0: a channel over all
  bool pool = false;  ///< the maximum of 2 × 2 follows the ReLU

  int64_t planes() const { return samples * channels; }
  int64_t plane() const { return height * width; }
  int64_t pooled_height() const { return height / 2; }
  int64_t pooled_width() const { return width / 2; }
  /// How many means there are, and of how many values each is.
  int64_t statistics() const {
    return groups == 0 ? channels : samples * groups;
  }
  int64_t values() const { return planes() * plane() / statistics(); }
  /// Into how many parts a plane is cut.
  int64_t parts() const;
  /// Values of scratch memory, forward and backward.
  int64_t scratch() const { return 2 * planes() * parts(); }
};

/// Whether this build has the kernels.
bool norm_kernels_built();

/// What one normalisation reads and, in the forward, finds.
struct NormTensors {
  const float* x = nullptr;
  const float* weight = nullptr;  ///< one a channel, as bias
  const float* bias = nullptr;
  float* mean = nullptr;  ///< one a statistic, as deviation
  float* inverse_deviation = nullptr;
};

/// Running statistics, of as many values as channels; null: none.
struct NormRunning {
  float* mean = nullptr;
  float* variance = nullptr;
  double momentum = 0;
};

/// Fills `y`, and with `pool` `places`: which of the four, 4 where the ReLU cut all.
/// `stream`: a cudaStream_t.
void norm_forward(const NormShape& shape, const NormTensors& tensors,
                  const NormRunning& running, double epsilon, float* scratch,
                  float* y, uint8_t* places, void* stream);

/// Fills the gradients of x (unless null), weight and bias. `sums`: scratch memory for
/// two values a statistic.
void norm_backward(const NormShape& shape, const NormTensors& tensors,
                   const float* dy, const uint8_t* places, float* scratch,
                   float* sums, float* dx, float* dweight, float* dbias,
                   void* stream);

}  // namespace reprise::kernels
