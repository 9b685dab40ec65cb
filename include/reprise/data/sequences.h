#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

/// Batches of sequences of different lengths, for the get() of a dataset.
namespace reprise {

struct PadOptions {
  double value = 0;  ///< of the padding
  /// Length of all rows; 0: that of the longest sequence. A fixed length keeps the memory
  /// of all micro-batches equal, so that plans hold and CUDA graphs are reused.
  int64_t length = 0;
  int64_t multiple = 1;  ///< the length is rounded up to a multiple of this
};

/// N sequences in rows of the same length T.
struct PaddedBatch {
  torch::Tensor values;   ///< (N, T) or (N, T, D)
  torch::Tensor lengths;  ///< (N), int64
  torch::Tensor mask;     ///< (N, T), bool: false at padding
};

/// Pads sequences of shape (t) or (t, D), which have the same type and D. Throws
/// c10::Error if there are none, they differ, or one is longer than `options.length`.
PaddedBatch pad_batch(const std::vector<torch::Tensor>& sequences,
                      const PadOptions& options = {});

/// Sequences one after another, S elements in total, without padding.
struct PackedBatch {
  torch::Tensor values;      ///< (S) or (S, D)
  torch::Tensor cu_seqlens;  ///< (N + 1), int32: begin of each sequence, then S
  torch::Tensor segments;    ///< (S), int64: number of the sequence, from 1
  torch::Tensor
      positions;        ///< (S), int64: position within the sequence, from 0
  int64_t longest = 0;  ///< length of the longest sequence
};

/// Concatenates sequences of shape (t) or (t, D), which have the same type and D. Throws
/// c10::Error if there are none or they differ.
PackedBatch pack_batch(const std::vector<torch::Tensor>& sequences);

}  // namespace reprise
