#pragma once

#include <reprise/data/dataset.h>

namespace reprise {

/// What a model's input is made of a batch's.
struct PrepareOptions {
  int64_t image_size = 0;  ///< side to enlarge to; 0: as it is
  double mean = 0, deviation = 1;
  bool pixel_targets = false;  ///< class + 1 where there is ink, 0 elsewhere
  bool channels_last = false;  ///< how the images lie
};

/// Enlarges (bilinear), scales to mean 0 and deviation 1: bytes to float on
/// whatever device they are on. Images that are float already are left alone;
/// so are tokens. Targets as the options say.
void prepare(Batch& batch, const PrepareOptions& options);

/// Moves both tensors, without waiting where they are in pinned memory.
void move_to(Batch& batch, torch::Device device);

}  // namespace reprise
