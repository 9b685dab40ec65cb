#pragma once

#include "memory/host_tensors.h"

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace reprise::detail {

/// An optimizer that can divide an update into parts, so that parameters are updated in the
/// backward, and keep its state in host memory. The results are those of Optimizer::step().
/// Tested by tests/train/step/backward_update_test.cpp.
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

  /// Moves the state to `host`, or to the device if it is null. State in host memory exists
  /// for all parameters that require a gradient now, and passes through the device in chunks
  /// during an update. `share`: of its bytes, by whole parameters; the rest stays on the
  /// device. Results do not depend on the place. Returns false, with nothing changed,
  /// if `host` has no room. Throws c10::Error, with nothing changed, if the device has none.
  virtual bool move_state(std::shared_ptr<HostTensors> host,
                          double share = 1) = 0;

  /// From now on, parameters in bfloat16 have their state in float32 and are updated in
  /// float32. The results are rounded up or down at random, such that expected values are
  /// exact. The random bits depend on the parameter and the number of its update only. To be
  /// called before the first update, for parameters whose state is on the device.
  virtual void round_stochastically() = 0;

  /// Bytes of state in host memory.
  virtual int64_t host_state_bytes() const = 0;
};

}  // namespace reprise::detail
