#pragma once

#include <reprise/recompute/schedule.h>

#include <cstdint>
#include <vector>

namespace reprise {

/// Costs of a forward run that keeps its autograd graph, and of its backward,
/// in bytes and milliseconds.
struct KeptRunCosts {
  std::vector<int> saved_inputs;   ///< indices of inputs saved for backward
  std::vector<int> saved_outputs;  ///< indices of outputs saved for backward
  int64_t saved_bytes = 0;         ///< other tensors saved for backward
  /// Activations saved in host memory (host_memory.h), as bytes of device
  /// memory once they are fetched. `backward_extra_bytes` includes them.
  int64_t host_bytes = 0;

  /// Transient memory of the run: its peak minus the memory in use when it
  /// ends.
  int64_t keep_extra_bytes = 0;
  /// Transient memory of the backward: its peak minus the memory in use when it
  /// begins, which includes the gradients of the outputs.
  int64_t backward_extra_bytes = 0;
  /// As `backward_extra_bytes`, if the stage's parameters have no gradients
  /// yet. Includes the gradients that the backward allocates. 0 if unknown.
  int64_t first_backward_extra_bytes = 0;

  double forward_ms = 0;   ///< device time
  double backward_ms = 0;  ///< device time
  /// Time that the host needs to launch the same work on an asynchronous
  /// device. 0 on the CPU.
  double forward_launch_ms = 0;
  double backward_launch_ms = 0;
  /// Part of `forward_ms` that a run right before its backward saves, since nothing reads its
  /// outputs; see outputs_unused().
  double unused_output_ms = 0;
};

/// Costs of one stage. A *buffer* is one storage; tensors that share memory are
/// one buffer. The outputs of a stage are, in order, the inputs of the next
/// one. Runs that drop and runs that keep their autograd graph take the same
/// time.
struct StageCosts : KeptRunCosts {
  struct Buffer {
    int64_t bytes = 0;
    int input = -1;  ///< index of the input it shares memory with; -1 if none
  };
  using Variant = KeptRunCosts;

  std::vector<Buffer> outputs;
  int64_t input_gradient_bytes = 0;  ///< gradients of the stage's inputs
  /// As `keep_extra_bytes`, for a run that drops its autograd graph.
  int64_t drop_extra_bytes = 0;
  /// Copies of the modules' buffers (BatchNorm's running statistics) that an
  /// execution makes to recompute the stage. Held from the first run to the
  /// backward if the stage is recomputed, and a second time during each
  /// recomputation.
  int64_t context_bytes = 0;
  /// Costs of the stage's variants; see Stage::with_variant().
  std::vector<Variant> variants;

  /// Returns the costs of the stage itself for 0, else `variants[variant - 1]`.
  /// Throws std::out_of_range if there is no such variant.
  const KeptRunCosts& kept_run(int variant) const {
    if (variant == 0) return *this;
    return variants.at(static_cast<size_t>(variant) - 1);
  }

  /// Returns the costs of a simple layer, for tests and examples: one output of
  /// `output_bytes`, saved for backward together with the input and
  /// `saved_bytes` more.
  static StageCosts simple(int64_t output_bytes, int64_t saved_bytes = 0,
                           double forward_ms = 1, double backward_ms = 2);
};

/// Costs of a chain.
struct ChainCosts {
  std::vector<int64_t> input_bytes;   ///< buffers of the chain's input
  int64_t output_gradient_bytes = 0;  ///< gradients of the chain's outputs
  std::vector<StageCosts> stages;

  /// Returns the costs of a chain with one input buffer, whose output gradient
  /// is as large as the last stage's output.
  static ChainCosts simple(int64_t input_bytes, std::vector<StageCosts> stages);
};

/// Predicted costs of a schedule.
struct Simulation {
  /// Maximum number of bytes kept for the backward pass at one time: boundaries
  /// held by the execution and saved activations, including the chain's input.
  int64_t kept_peak_bytes = 0;
  int64_t kept_after_forward_bytes = 0;
  int64_t host_peak_bytes = 0;  ///< maximum of activations in host memory

  /// Peak memory minus the memory before the forward pass, which includes the
  /// chain's input. Includes gradients of activations and temporaries of
  /// operators, but not gradients of parameters.
  int64_t peak_bytes = 0;
  size_t peak_op = 0;  ///< index of the operation that reaches the peak

  /// Live memory at the peak. The values add up to `peak_bytes`.
  struct AtPeak {
    std::vector<int64_t> kept_by_stage;  ///< kept bytes by producing stage
    int64_t gradient_bytes = 0;          ///< gradients of a boundary
    int64_t workspace_bytes = 0;  ///< temporaries of the operation at the peak
  };
  AtPeak at_peak;

  std::vector<int> runs;  ///< number of forward runs per stage
  int total_runs = 0;
  /// Time of the device's work or of the host's launches, whichever is longer.
  double time_ms = 0;
};

/// Computes the costs of `schedule` without running it. Throws c10::Error if
/// the number of stages differs or if a variant of the schedule has no costs.
Simulation simulate(const Schedule& schedule, const ChainCosts& chain_costs);

}  // namespace reprise
