#pragma once

#include "compat/rng.h"

#include <reprise/train/run_directory.h>

#include <torch/types.h>

#include <vector>

namespace reprise::detail {

/// What a window changes before its update, as it was when the window began, so
/// that the window can be run again. Gradients are not in it: there are none at
/// a window's start, and those of a window that was continued from disk are
/// still there.
class WindowSnapshot {
 public:
  /// `buffers`: the model's own; they change in a forward (BatchNorm).
  WindowSnapshot(torch::Device device, std::vector<torch::Tensor> buffers);

  /// Where it throws, what it held before stays.
  void remember(const RunState& state, int64_t samples_here);

  /// Puts generators and buffers back. May be called again where it throws.
  void restore() const;

  const RunState& state() const { return state_; }
  int64_t samples_here() const { return samples_here_; }

 private:
  torch::Device device_;
  std::vector<torch::Tensor> buffers_;
  std::vector<torch::Tensor> copies_;
  compat::RngState rng_;
  RunState state_;
  int64_t samples_here_ = 0;
};

}  // namespace reprise::detail
