#pragma once

#include <reprise/memory/categories.h>
#include <reprise/train/config.h>

#include <cstdint>
#include <string>
#include <vector>

namespace reprise {

/// Memory and time of a training by phase and by stage.
struct TrainingProfile {
  std::string model, data, device, precision, optimizer, recompute;
  int64_t parameters = 0;  ///< number of parameter values
  /// Samples per micro-batch, and micro-batches per window.
  int64_t micro_batch = 0, accumulate = 0;

  /// A phase of the training. Bytes are those live on the device.
  struct Phase {
    std::string name;
    int64_t before_bytes = 0;  ///< when the phase begins
    int64_t after_bytes = 0;   ///< when the phase ends
    int64_t peak_bytes = 0;    ///< highest value within the phase
    double ms = 0;             ///< duration in milliseconds

    /// Bytes that the phase adds; negative if it frees memory.
    int64_t increment_bytes() const { return after_bytes - before_bytes; }
  };
  /// Phases in order, without gaps: model, data, optimizer state (the first
  /// updates, including memory that libraries allocate once); then those of one
  /// window: batch, forward, last stage (with the loss), backward (with
  /// recomputation), other micro-batches (only with accumulation) and update.
  /// Measured without a CUDA graph, whose parts cannot be observed, without
  /// reading batches ahead, and with the device idle between two phases.
  std::vector<Phase> phases;
  /// Number of phases before those of the window.
  static constexpr size_t kSetupPhases = 3;

  /// Returns the milliseconds of a window as the sum of its phases.
  double phases_ms() const;

  /// Milliseconds of a window as `train` runs it: with a CUDA graph if it uses
  /// one, and without observation. Median of several windows.
  double step_ms = 0;
  /// Whether `step_ms` is with a CUDA graph: "on", "off" or "off: REASON".
  std::string graph = "off";

  /// Costs of a stage for one micro-batch.
  struct Stage {
    std::string name;
    int64_t output_bytes = 0;
    int64_t kept_bytes = 0;  ///< saved for the backward by the strategy
    /// Temporary memory: the peak of the forward above what it leaves live, and
    /// the peak of the backward above what was live when it began.
    int64_t forward_extra_bytes = 0;
    int64_t backward_extra_bytes = 0;
    double forward_ms = 0;
    double backward_ms = 0;
  };
  std::vector<Stage> stages;

  /// Size of a dataset that is resident in host memory. Counted in the phase
  /// "data" and in no other figure.
  int64_t dataset_bytes = 0;
  int64_t kept_bytes = 0;  ///< saved for the backward after a forward
  int64_t peak_bytes = 0;  ///< peak of a window
  std::string peak_phase;  ///< data, forward, backward or update
  std::string peak_stage;  ///< stage of the peak; empty: outside of stages
  MemoryBreakdown memory;  ///< memory by category at the peak
};

/// Builds the model, opens the data and runs a few windows, the last of them
/// with every operation observed. Then trains some more windows with a Trainer,
/// for `step_ms`; no other figure includes these or the memory of their CUDA
/// graphs. The learning rate is 0. `config` must be resolved. Throws c10::Error
/// if the configuration cannot be run.
TrainingProfile profile_training(const TrainConfig& config);

/// Returns human-readable tables of the phases, the stages and the peak.
std::string to_text(const TrainingProfile& profile);

/// Returns a JSON object: phases[], phases_ms, step_ms, graph, stages[], total{},
/// kept_bytes, peak_bytes, peak_at{phase, stage}, memory{}.
std::string to_json(const TrainingProfile& profile);

}  // namespace reprise
