#pragma once

#include <reprise/recompute/schedule.h>

#include <cstdint>
#include <vector>

namespace reprise {

/// What a run that keeps its graph costs, and the backward that goes with it,
/// in bytes and milliseconds.
struct KeptRunCosts {
  std::vector<int> saved_inputs;   ///< positions that the graph holds
  std::vector<int> saved_outputs;  ///< positions that the graph holds
  int64_t saved_bytes = 0;         ///< what else the graph holds
  /// What it has in the host's memory (host_memory.h), as bytes of the device's once
  /// it is back; `backward_extra_bytes` includes that.
  int64_t host_bytes = 0;

  /// Highest rise over what is held before the run, beyond what it leaves
  /// behind.
  int64_t keep_extra_bytes = 0;
  /// Highest rise of the backward over what is held when it begins, the
  /// gradient of the outputs included in the latter.
  int64_t backward_extra_bytes = 0;
  /// The same where the stage's parameters have no gradient yet: these, which
  /// stay, included. 0: not known.
  int64_t first_backward_extra_bytes = 0;

  double forward_ms = 0;
  double backward_ms = 0;
  /// What the host needs to start the same work on a device that runs on its
  /// own; 0 on the CPU, where the host is the device.
  double forward_host_ms = 0;
  double backward_host_ms = 0;
};

/// What one stage costs. A *buffer* is one storage; tensors that share memory
/// are one buffer. The outputs of a stage are, in order, the inputs of the
/// next. A run that drops its graph takes as long as one that keeps it.
struct StageCosts : KeptRunCosts {
  struct Buffer {
    int64_t bytes = 0;
    int input = -1;  ///< the stage's input that it shares memory with, or none
  };
  using Variant = KeptRunCosts;

  std::vector<Buffer> outputs;
  int64_t input_gradient_bytes = 0;
  /// As `keep_extra_bytes`, for a run that drops its graph.
  int64_t drop_extra_bytes = 0;
  /// What an execution copies to run the stage again: the buffers of its modules
  /// (BatchNorm's statistics). Held from the first run to the backward if the
  /// stage runs again, and once more during each later run.
  int64_t context_bytes = 0;
  /// Other ways to run the stage with its graph kept: see Stage::with_variant.
  std::vector<Variant> variants;

  /// The stage itself for 0, else `variants[variant - 1]`.
  const KeptRunCosts& kept_as(int variant) const {
    if (variant == 0) return *this;
    return variants.at(static_cast<size_t>(variant) - 1);
  }

  /// One new output of `output_bytes`, saved together with the input and
  /// `saved_bytes` more: a plain layer, for calculations by hand.
  static StageCosts simple(int64_t output_bytes, int64_t saved_bytes = 0,
                           double forward_ms = 1, double backward_ms = 2);
};

struct ChainCosts {
  std::vector<int64_t> input_bytes;  ///< buffers of the chain's input
  int64_t output_gradient_bytes = 0;
  std::vector<StageCosts> stages;

  static ChainCosts simple(int64_t input_bytes, std::vector<StageCosts> stages);
};

/// What a schedule costs.
struct Simulation {
  /// Most bytes held for the backward at one moment: boundaries held by the
  /// executor and tensors saved by graphs, the chain's input included.
  int64_t kept_peak_bytes = 0;
  int64_t kept_after_forward_bytes = 0;
  int64_t host_peak_bytes = 0;  ///< most that is in the host's memory

  /// Highest rise over the memory before the forward, in which the input is
  /// there already; gradients in flight and operators' temporaries included,
  /// gradients of parameters not.
  int64_t peak_bytes = 0;
  size_t peak_op = 0;  ///< operation that reaches it

  /// What is live at the peak; adds up to `peak_bytes`.
  struct AtPeak {
    std::vector<int64_t> kept_by_stage;  ///< by the stage that made it
    int64_t gradient_bytes = 0;          ///< of a boundary, in flight
    int64_t workspace_bytes = 0;         ///< temporaries of the operation
  };
  AtPeak at_peak;

  std::vector<int> runs;  ///< by stage
  int total_runs = 0;
  /// The device's work or, where that takes longer, the host's.
  double time_ms = 0;
};

/// Walks `schedule` with these figures; no tensor is touched. Throws c10::Error
/// where the numbers of stages differ or a variant has no figures.
Simulation simulate(const Schedule& schedule, const ChainCosts& figures);

}  // namespace reprise
