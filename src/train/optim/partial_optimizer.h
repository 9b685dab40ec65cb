#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

namespace reprise::detail {

/// An optimizer that can divide an update into parts, so that parameters are updated in the
/// backward. The results are those of Optimizer::step(). Tested by
/// tests/train/step/backward_update_test.cpp.
///
///     optimizer.begin_update(lr);
///     for each set of parameters with final gradients:
///       optimizer.update_some(set, /*captured=*/false);
///     optimizer.end_update(all of them);
///
/// A CUDA graph that contains update_some() can be replayed between begin_update() and
/// end_update(): values that change from update to update are read from device memory.
class PartialOptimizer {
 public:
  virtual ~PartialOptimizer() = default;

  /// Begins an update with learning rate `lr`. Allocates the state of all parameters that
  /// require a gradient; changes no values. May be called again to repeat an update of which
  /// no part was run.
  virtual void begin_update(double lr) = 0;

  /// Updates those of `parameters` that have a gradient and belong to the optimizer.
  /// `captured`: within the capture of a CUDA graph; throws c10::Error if the update of one
  /// of them cannot be captured. Memory that is needed is allocated before any value changes.
  virtual void update_some(const std::vector<torch::Tensor>& parameters,
                           bool captured) = 0;

  /// Ends the update: counts it for `updated`, the parameters that update_some() changed.
  virtual void end_update(const std::vector<torch::Tensor>& updated) = 0;

  /// Returns why update_some() cannot be captured; empty if it can.
  virtual std::string capture_refusal() const = 0;
};

}  // namespace reprise::detail
