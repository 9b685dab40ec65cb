#pragma once

#include <reprise/models/model.h>

#include <torch/types.h>

#include <string>

/// Rows of several documents and padding, for language models.
///
/// The third tensor of a batch, `segments` (N, T) int64, has the number of the document
/// that each token belongs to, from 1 and from left to right; 0 is padding. A token attends
/// to itself and to the tokens before it in its own segment, and positions restart at each
/// segment. Padding is a segment too, so that no row of the attention is empty; nothing
/// else attends to it.
///
/// The first stage of a model converts `segments` once for all of its blocks, and the chain
/// passes the results on behind the targets. Tested by tests/models/segments_test.cpp.
namespace reprise::detail {

/// Position of each token in its segment, from 0: (N, T) int64.
torch::Tensor segment_positions(const torch::Tensor& segments);

/// (N, 1, T, T) of `type` to add to the scores of the attention: 0 if token t attends to
/// token s, -∞ otherwise.
torch::Tensor segment_mask(const torch::Tensor& segments,
                           torch::ScalarType type);

/// Throws c10::Error unless `batch` is {tokens, targets} or {tokens, targets, segments}, or
/// tokens alone, and the segments have the shape of the tokens.
void check_language_batch(const std::string& name, const Tensors& batch);

/// Whether the batch, or the tensors between the stages, have segments.
inline bool has_segments(const Tensors& tensors) {
  return tensors.size() > 2;
}

/// What a stage passes on behind hidden values and targets.
inline Tensors segment_tensors(const Tensors& tensors) {
  if (!has_segments(tensors)) return {};
  return {tensors.begin() + 2, tensors.end()};
}

}  // namespace reprise::detail
