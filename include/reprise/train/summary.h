#pragma once

#include <reprise/memory/categories.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace reprise {

/// Settings, speed and memory of a training, computed at its end.
struct TrainSummary {
  std::string model, device, precision, optimizer, recompute, data;
  int64_t parameters = 0;  ///< number of parameter values
  /// Samples per micro-batch, micro-batches per window, and samples per update.
  int64_t micro_batch = 0, accumulate = 0, global_batch = 0;
  /// Number of processes. With several of them, samples_per_s and the losses
  /// cover all ranks; all other figures are those of rank 0.
  int64_t ranks = 1;
  std::string backend;         ///< gloo or nccl; empty: single process
  int64_t reduce_calls = 0;    ///< reductions of gradient buckets, this process
  int64_t reduce_bytes = 0;    ///< bytes in these buckets
  int64_t reduce_windows = 0;  ///< windows with reductions
  double reduce_s = 0;         ///< seconds with a reduction in progress
  double reduce_wait_s = 0;    ///< seconds of these after the backward
  int64_t gather_calls = 0;    ///< gathers of divided parameters, this process
  int64_t gather_bytes = 0;    ///< bytes that these gathered
  double gather_wait_s = 0;    ///< seconds in which stages waited for them
  int64_t steps = 0;           ///< updates, including those before a resume
  int64_t skipped = 0;         ///< updates skipped because gradients overflowed

  double time_s = 0;  ///< seconds of training, without evaluation and saving
  /// Speed of the updates after the two warm-up updates and after the last
  /// capture of a CUDA graph; of all updates if there are fewer than two such
  /// updates.
  double samples_per_s = 0;
  double wait_s = 0;         ///< part of time_s spent waiting for data
  int64_t data_samples = 0;  ///< samples per epoch; 0: a stream

  /// Reasons why the times may be misleading, one sentence each: denormal
  /// numbers, waiting for data, other programs on the machine.
  std::vector<std::string> warnings;

  std::optional<double> loss;       ///< mean loss of the last update
  std::optional<double> eval_loss;  ///< of the last evaluation
  /// Metrics of the last evaluation, by name; of built-in models "accuracy".
  std::map<std::string, double> eval_metrics;

  /// Highest number of bytes live on the device at any time. The memory of CUDA
  /// graphs always counts as live. A dataset that is resident in host memory
  /// does not count.
  int64_t peak_bytes = 0;
  int64_t dataset_bytes = 0;   ///< dataset resident in host memory
  int64_t reserved_bytes = 0;  ///< peak of memory reserved from the CUDA driver
  int64_t kept_bytes = 0;      ///< saved for the backward after a forward
  int64_t host_bytes = 0;      ///< pinned host memory for offloaded activations
  int64_t host_state_bytes = 0;  ///< optimizer state in host memory
  int64_t rss_peak_bytes = 0;    ///< peak resident set size of the process
  int64_t limit_bytes = 0;       ///< memory budget; 0: none

  /// Prediction of a plan.
  struct Predicted {
    int64_t peak_bytes = 0;
    double step_ms = 0;  ///< milliseconds per window
    bool operator==(const Predicted&) const = default;
  };
  std::optional<Predicted> predicted;  ///< of the last plan; empty: not planned
  int64_t replans = 0;                 ///< plans after the first one
  std::string graph = "off";      ///< CUDA graphs: "on", "off" or "off: REASON"
  int64_t graph_captures = 0;     ///< CUDA graph captures of this process
  int64_t graph_replays = 0;      ///< CUDA graph replays of this process
  std::string peak_phase;         ///< forward, backward or update
  std::string peak_stage;         ///< stage of the peak; empty: in the update
  int64_t window_peak_bytes = 0;  ///< peak of the profiled window
  MemoryBreakdown memory;         ///< memory by category at that peak
};

/// Returns a JSON object with the keys time_s, samples_per_s, peak_bytes, … and
/// memory.
std::string to_json(const TrainSummary& summary);

/// Parses the result of to_json(). Throws c10::Error if `text` is not such an
/// object.
TrainSummary summary_from_json(const std::string& text);

/// Returns a human-readable table: time, samples/s, memory, and memory by
/// category.
std::string to_table(const TrainSummary& summary);

/// Returns the value of a metric as text; accuracies as percentages.
std::string metric_text(const std::string& name, double value);

/// Returns a table of two runs, BEFORE and AFTER, with the ratio of each
/// figure.
std::string compare(const TrainSummary& before, const TrainSummary& after);

}  // namespace reprise
