#pragma once

#include "compat/rng.h"
#include "train/store/run_state.h"

#include <torch/types.h>

#include <vector>

namespace reprise::detail {

/// State at the start of a window that the window changes before its update, so
/// that the window can be repeated. Gradients are not included: a window starts
/// without gradients, and those of a resumed window can be read again from
/// disk. Tested by tests/train/step/oom_retry_test.cpp.
class WindowSnapshot {
 public:
  /// `buffers` are those of the model, which a forward changes (BatchNorm).
  WindowSnapshot(torch::Device device, std::vector<torch::Tensor> buffers);

  /// Takes a snapshot of the generators, the buffers and the arguments. If it
  /// throws, the previous snapshot is unchanged.
  void remember(const RunState& state, int64_t samples_here);
  /// Takes a snapshot of generators and buffers only, for work between windows
  /// that runs the model.
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
