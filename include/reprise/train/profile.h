#pragma once

#include <reprise/memory/categories.h>
#include <reprise/train/config.h>

#include <cstdint>
#include <string>
#include <vector>

namespace reprise {

/// Where the memory and the time of a training go.
struct TrainingProfile {
  std::string model, data, device, precision, optimizer, recompute;
  int64_t parameters = 0;  ///< how many
  int64_t micro_batch = 0, accumulate = 0;

  /// What happens between two moments, with the bytes live on the device.
  struct Phase {
    std::string name;
    int64_t before_bytes = 0;
    int64_t after_bytes = 0;
    int64_t peak_bytes = 0;  ///< most live inside it
    double ms = 0;

    int64_t increment_bytes() const { return after_bytes - before_bytes; }
  };
  /// Each begins where the one before ends: model, data, optimizer state (the
  /// first updates, and what libraries keep from then on); then of a window
  /// batch, forward, last stage (with the loss), backward (and what runs again),
  /// other micro-batches, update. Without accumulation there are no others.
  std::vector<Phase> phases;

  /// Of a micro-batch.
  struct Stage {
    std::string name;
    int64_t output_bytes = 0;
    int64_t kept_bytes = 0;  ///< after the forward, as the strategy keeps it
    /// Temporaries: the highest rise of a run over what it leaves behind, and of
    /// the backward over what is there when it begins.
    int64_t forward_extra_bytes = 0;
    int64_t backward_extra_bytes = 0;
    double forward_ms = 0;
    double backward_ms = 0;
  };
  std::vector<Stage> stages;

  /// Resident in host memory; only the phase "data" shows it, no other figure counts
  /// it.
  int64_t dataset_bytes = 0;
  int64_t kept_bytes = 0;  ///< held for the backward after a forward
  int64_t peak_bytes = 0;  ///< of a window
  std::string peak_phase;  ///< data, forward, backward, update
  std::string peak_stage;  ///< name; empty where it is in none
  MemoryBreakdown memory;  ///< at that peak
};

/// Makes the model, opens the data and runs a few windows, the last of them with
/// a look at every operation. Learns nothing: the rate is 0. `config` must be
/// resolved. Batches are read where they are used, so that on the CPU none is
/// counted that was read ahead. Throws c10::Error where the configuration cannot
/// be run.
TrainingProfile profile_training(const TrainConfig& config);

/// For people: the phases, the stages, the moment of the peak.
std::string to_text(const TrainingProfile& profile);

/// The same as one object: phases[], stages[], total{}, kept_bytes, peak_bytes,
/// peak_at{phase, stage}, memory{}.
std::string to_json(const TrainingProfile& profile);

}  // namespace reprise
