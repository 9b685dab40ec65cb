#pragma once

#include "compat/rng.h"

#include <reprise/train/run_directory.h>

#include <torch/types.h>

#include <vector>

namespace reprise::detail {

/// What a window changes before its update, as it was when the window began, so that the
/// window can be repeated. Gradients are not included: there are none at a window's start,
/// and those of a window that was resumed from disk are still there.
class WindowSnapshot {
 public:
  /// `buffers` of the model; a forward changes them (BatchNorm).
  WindowSnapshot(torch::Device device, std::vector<torch::Tensor> buffers);

  /// If it throws, the previous snapshot is unchanged.
  void remember(const RunState& state, int64_t samples_here);
  /// Takes generators and buffers only, for work between windows that runs the model.
  void remember_tensors();

  /// Restores generators and buffers. May be called again if it throws.
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
