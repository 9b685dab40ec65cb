#pragma once

#include <reprise/recompute/chain.h>
#include <reprise/recompute/simulate.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace reprise {

struct StageCostOptions {
  int repeats = 1;  ///< minimum number of timed runs per stage
  /// A stage is timed until its runs took `min_total_ms` in total, or
  /// `max_repeats` times if that comes first.
  double min_total_ms = 0;
  int max_repeats = 1;
  /// Called before each backward of a stage. The returned object is destroyed
  /// after that backward. For training code that changes how gradients are
  /// accumulated.
  std::function<std::shared_ptr<void>()> around_backward{};
};

/// Measures the costs of every stage of `chain` on `inputs`, one stage at a
/// time, so that at most one stage's autograd graph exists at any time. Stages
/// run twice and variants once before they are timed; times are medians of the
/// runs after that. On CUDA, device times are measured with events while the
/// device is kept busy, so that they do not include launch times, which are
/// reported separately.
///
/// Gradients, buffers and random generators are restored afterwards. Throws
/// c10::Error if grad mode is off, if there are no inputs or if `repeats` is
/// less than 1. All inputs and modules must be on one device.
ChainCosts measure_stage_costs(const Chain& chain, const Tensors& inputs,
                               const StageCostOptions& options);
ChainCosts measure_stage_costs(const Chain& chain, const Tensors& inputs,
                               int repeats = 1);

/// Returns the bytes of each stage's outputs. Outputs that share memory with
/// the chain's input count as 0, since the caller holds it. The first overload
/// runs the chain once in no-grad mode and restores buffers and random
/// generators afterwards.
std::vector<int64_t> output_bytes(const Chain& chain, const Tensors& inputs);
std::vector<int64_t> output_bytes(const ChainCosts& chain_costs);

}  // namespace reprise
