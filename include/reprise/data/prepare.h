#pragma once

#include <reprise/data/dataset.h>

namespace reprise {

/// How prepare() turns a batch of the loader into the input of a model.
struct PrepareOptions {
  int64_t image_size = 0;       ///< side length to resize to; 0: keep the size
  double mean = 0, stddev = 1;  ///< of the pixels, scaled to [0, 1]
  /// Per-pixel targets: class + 1 for pixels above 0.5, else 0.
  bool pixel_targets = false;
  bool channels_last = false;  ///< memory format of the images
};

/// Resizes uint8 images (bilinear), converts them to float on their device and
/// normalizes them with `mean` and `stddev`; sets the targets. Float images and
/// tokens are left unchanged. Throws c10::Error if an option is invalid or the
/// inputs are not (N, C, H, W).
void prepare(Batch& batch, const PrepareOptions& options);

/// Moves inputs and targets to `device`. Copies from pinned memory are
/// asynchronous.
void move_to(Batch& batch, torch::Device device);

}  // namespace reprise
