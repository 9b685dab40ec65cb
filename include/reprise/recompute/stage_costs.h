#pragma once

#include <reprise/recompute/chain.h>
#include <reprise/recompute/simulate.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace reprise {

struct StageCostOptions {
  int repeats = 1;  ///< at least so many timed runs of each stage
  /// A quick stage is run more often, until its runs took this long together,
  /// up to `most_repeats` of them.
  double enough_ms = 0;
  int most_repeats = 1;
  /// Called before each backward of a stage; what it returns lives during that backward.
  /// For what a training does to gradients meanwhile, such as SmallGradients.
  std::function<std::shared_ptr<void>()> around_backward{};
};

/// Measures the figures of every stage of `chain` on `inputs`, one stage at a
/// time: at most one stage's graph exists at any moment. Each stage runs twice
/// before it is timed, a variant once; times are medians of the runs after that.
/// On CUDA they are the device's own, between events, while earlier work keeps it
/// busy, so that the host's time to start a stage is a figure of its own.
/// Gradients, buffers and random generators are afterwards as they were before.
/// Needs grad mode; inputs and modules on one device.
ChainCosts measure_stage_costs(const Chain& chain, const Tensors& inputs,
                               const StageCostOptions& options);
ChainCosts measure_stage_costs(const Chain& chain, const Tensors& inputs,
                               int repeats = 1);

/// What holding each stage's output takes; the chain's own input is the caller's
/// and costs nothing. Runs the chain once without gradients; buffers and random generators are
/// afterwards as they were before.
std::vector<int64_t> output_bytes(const Chain& chain, const Tensors& inputs);
std::vector<int64_t> output_bytes(const ChainCosts& figures);

}  // namespace reprise
