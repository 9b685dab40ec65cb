#pragma once

#include <reprise/memory/categories.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace reprise {

/// What a training ends with.
struct TrainSummary {
  std::string model, device, precision, optimizer, recompute, data;
  int64_t parameters = 0;  ///< how many
  int64_t micro_batch = 0, accumulate = 0, global_batch = 0;
  /// Of many processes; the figures are rank 0's, but for samples_per_s and losses,
  /// which are everybody's.
  int64_t ranks = 1;
  std::string backend;         ///< gloo, nccl; empty: one process
  int64_t reduce_calls = 0;    ///< of gradients' buckets, by this process
  int64_t reduce_bytes = 0;    ///< in these buckets
  int64_t reduce_windows = 0;  ///< that they belong to
  double reduce_s = 0;         ///< during which some were under way
  double reduce_wait_s = 0;    ///< of these, after the backward had ended
  int64_t steps = 0;    ///< updates in all, those before a resume included
  int64_t skipped = 0;  ///< updates left out for gradients that overflowed

  double time_s = 0;  ///< of training, without evaluation and saving
  /// Of the updates after the first two, which warm up, and after the last capture of a
  /// CUDA graph; of all if there are not two such updates.
  double samples_per_s = 0;
  double wait_s = 0;         ///< of time_s, waiting for data
  int64_t data_samples = 0;  ///< of the training data: an epoch

  /// What makes the figures of time doubtful, one sentence each: denormal numbers,
  /// waiting for data, other programs on the machine. Empty: nothing was found.
  std::vector<std::string> warnings;

  std::optional<double> loss;  ///< of the last update
  std::optional<double> eval_loss, eval_accuracy;

  /// Most live on the device at one moment. If there are CUDA graphs, all that they
  /// hold counts as live, whether they run or not. A dataset that is resident in host
  /// memory is not part of it.
  int64_t peak_bytes = 0;
  int64_t dataset_bytes = 0;   ///< resident in host memory, beside the peak
  int64_t reserved_bytes = 0;  ///< most taken from the driver (CUDA)
  int64_t kept_bytes = 0;      ///< held for the backward after a forward
  int64_t host_bytes = 0;  ///< pinned by the host for activations moved there
  int64_t rss_peak_bytes = 0;
  int64_t limit_bytes = 0;  ///< the peak should not pass it; 0: none

  struct Predicted {
    int64_t peak_bytes = 0;
    double step_ms = 0;
    bool operator==(const Predicted&) const = default;
  };
  std::optional<Predicted> predicted;  ///< by the last plan; none: not planned
  int64_t replans = 0;                 ///< plans after the first
  std::string graph = "off";           ///< on, off, or "off: " and why
  int64_t graph_captures = 0;          ///< by this process, as the next
  int64_t graph_replays = 0;
  std::string peak_phase;         ///< forward, backward, update
  std::string peak_stage;         ///< name; empty in an update
  int64_t window_peak_bytes = 0;  ///< of the window that was looked into
  MemoryBreakdown memory;         ///< at that window's peak
};

/// One object with the keys time_s, samples_per_s, peak_bytes, … and memory.
std::string to_json(const TrainSummary& summary);

/// Throws c10::Error where the text is no such object.
TrainSummary summary_from_json(const std::string& text);

/// For people: Time, Samples/second, memory, and memory by category.
std::string to_table(const TrainSummary& summary);

/// Two runs as BEFORE and AFTER, with the ratio of each figure.
std::string compare(const TrainSummary& before, const TrainSummary& after);

}  // namespace reprise
