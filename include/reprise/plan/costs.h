#pragma once

#include <reprise/plan/modes.h>
#include <reprise/recompute/simulate.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reprise {

/// Memory, in bytes, that depends neither on the micro-batch size nor on the
/// schedule.
struct FixedMemory {
  int64_t parameters = 0;  ///< parameters and buffers
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t data = 0;       ///< part of the dataset that is on the device
  int64_t workspace = 0;  ///< metrics, and workspaces of libraries

  int64_t total() const {
    return parameters + gradients + optimizer + data + workspace;
  }
};

/// Costs of one micro-batch of a given size.
struct SizeCosts {
  int64_t micro_batch = 0;
  ChainCosts chain_costs;
  int64_t data_bytes = 0;  ///< the micro-batch and those prefetched
  /// Peak memory while a micro-batch is prepared, before the chain runs.
  /// Includes prefetched micro-batches and temporaries.
  int64_t prepare_bytes = 0;
  /// Workspaces that libraries such as cuBLAS keep after the micro-batch has
  /// run.
  int64_t workspace_bytes = 0;
  /// Additional workspaces if the micro-batch runs as a CUDA graph.
  int64_t graph_workspace_bytes = 0;
  /// Time outside of the chain, for copying and preparing the micro-batch.
  double other_ms = 0;
  /// Measured time of a micro-batch, as a CUDA graph if there can be one, divided by that
  /// predicted from its stages' times (of a graph, from those on the device), if
  /// each stage has an autograd graph of its own and if one graph spans all
  /// stages. The first is larger, because every autograd graph needs a backward
  /// call.
  double separate_graphs_factor = 1;
  double single_graph_factor = 1;
};

/// Measured time of a micro-batch under a schedule, run as in training.
struct TriedSchedule {
  int64_t micro_batch = 0;
  std::string schedule;  ///< output of Schedule::to_text()
  double ms = 0;
  bool graph = false;  ///< whether it ran as a CUDA graph
  /// Schedules with the same positive number were timed alternately, so that
  /// their times are comparable. 0 if the schedule was timed by itself.
  int64_t comparison = 0;
  /// With kBackward, the time includes the update.
  UpdateMode update = UpdateMode::kAfter;
  /// Measured peak less the predicted one. Neither the caching of CUDA's allocator nor
  /// memory that a library allocates for a while is part of a prediction.
  int64_t extra_bytes = 0;
};

/// Memory of the gradients that ranks exchange while the backward of a window's last
/// micro-batch runs. Empty for a single process.
struct ExchangeMemory {
  /// By stage, when its backward is over and complete buckets are on the way: gradients that
  /// have left, and buckets with their sums.
  std::vector<int64_t> left{}, held{};
  /// By stage: at most while these buckets start, beyond what is there before.
  std::vector<int64_t> peak{};
  int64_t end_peak = 0;  ///< at most after all that, beyond the gradients
  int64_t sums = 0;      ///< gradients during the update
  int64_t gather = 0;    ///< buffers that gather the updated parameters

  bool empty() const { return left.empty(); }
  /// What is there beyond the gradients when the backward of `stage` is over.
  int64_t change_at(size_t stage) const {
    return stage < held.size() ? held[stage] - left[stage] : 0;
  }
};

/// Costs of training at one precision, measured at several micro-batch sizes.
struct CostProfile {
  /// Identifies model, shapes, precision, device and versions.
  std::string key;
  Precision precision = Precision::kFp32;
  std::vector<std::string> stages;  ///< names of the stages
  /// Bytes of the parameters' gradients, by the stage whose backward creates
  /// them first.
  std::vector<int64_t> gradient_bytes;
  /// The part of `gradient_bytes` that is allocated a second time, besides the
  /// accumulated sum, from that backward to the end of the micro-batch. This
  /// applies to parameters that several stages share (tied weights) and to
  /// small parameters whose gradients are added together.
  std::vector<int64_t> held_twice_bytes;
  /// Bytes of the parameters' gradients, by the stage whose backward makes them
  /// final: the first stage that uses them. Empty if updates in the backward
  /// were not measured.
  std::vector<int64_t> final_gradient_bytes{};
  /// Temporaries of an update in the backward, by the stage whose backward it
  /// follows; 0 for stages that no update follows.
  std::vector<int64_t> stage_update_bytes{};
  FixedMemory fixed;
  double update_ms = 0;  ///< time of the optimizer's step
  /// Time of the parts of a step that updates parameters in the backward, when their
  /// gradients are still in the cache of the device; 0: not measured.
  double backward_update_ms = 0;
  int64_t update_bytes = 0;  ///< temporaries of the optimizer's step
  /// Whether micro-batches run as CUDA graphs; kAuto: if it fits. The memory of a CUDA graph
  /// cannot be shared. It is therefore needed in addition to the update's temporaries and a
  /// second copy of the micro-batch, and gradients stay allocated from window to window.
  GraphMode graph = GraphMode::kOff;
  /// When parameters are updated; kAuto: either way. kBackward applies to windows of one
  /// micro-batch only. Not part of the JSON text.
  UpdateMode update = UpdateMode::kAfter;
  /// Whether a CUDA graph can contain the update; otherwise plans with kBackward
  /// have none.
  bool captures_update = false;
  /// Optimizer state, parameters and gradients in host memory.
  int64_t host_state_bytes = 0;
  /// Parameters in host memory and their gradients, by the stage that uses them, in bytes of
  /// device memory while they are there; see StatePlace::kHostAll. Empty: none. They are not
  /// part of `fixed`, `gradient_bytes` and `final_gradient_bytes`. All updates are then in the
  /// backward of the window's last micro-batch.
  std::vector<int64_t> moved_bytes{};
  std::vector<int64_t> moved_gradient_bytes{};
  /// Parameters that each stage uses; those of several stages count for each.
  std::vector<int64_t> stage_parameter_bytes{};
  /// Bytes that travel to gather them from other ranks, in half precision where stages read
  /// nothing else. Empty: stage_parameter_bytes.
  std::vector<int64_t> stage_wire_bytes{};
  double to_device_bytes_per_ms = 0;  ///< speed of copies from host memory
  double to_host_bytes_per_ms = 0;
  bool moves_parameters() const { return !moved_bytes.empty(); }
  /// `moved_bytes` are gathered from other ranks instead, each at this delay besides the time
  /// of `to_device_bytes_per_ms`; gradients stay, and updates are made after the backward.
  bool gathers_parameters = false;
  double gather_delay_ms = 0;
  /// What several ranks exchange; `exchange_of_graph` if a CUDA graph keeps the gradients in
  /// place. Not saved with the profile.
  ExchangeMemory exchange{}, exchange_of_graph{};
  /// Gradients are added up as GradientSums::kBf16: `fixed.gradients` are the sums, and those
  /// of a micro-batch exist as in an update in the backward, which the last one has.
  bool half_gradients = false;
  /// Whether the last micro-batch of a window updates in its backward, however many there are.
  bool updates_in_last() const {
    return (moves_parameters() && !gathers_parameters) || half_gradients;
  }
  std::vector<SizeCosts> sizes;  ///< measured sizes in ascending order
  std::vector<TriedSchedule> tried{};

  /// Returns whether `micro_batch` is one of `sizes`.
  bool measured(int64_t micro_batch) const;

  /// Returns the costs at `micro_batch`. Sizes that were not measured are
  /// interpolated linearly, or extrapolated from the two nearest sizes. If tensors
  /// share memory at one of the two but not at the other, the costs of the larger
  /// one are scaled instead. Throws
  /// c10::Error if nothing was measured or `micro_batch` is not positive.
  SizeCosts at(int64_t micro_batch) const;

  /// Adds the costs of one size, replacing earlier ones of the same size.
  void add(SizeCosts costs);

  /// Returns the timing of a schedule at one size, with or without a CUDA
  /// graph and updates in the backward, or null if there is none.
  const TriedSchedule* find_tried(int64_t micro_batch,
                                  const std::string& schedule, bool graph,
                                  UpdateMode update = UpdateMode::kAfter) const;
  /// As find_tried(), but returns the milliseconds only.
  std::optional<double> tried_ms(int64_t micro_batch,
                                 const std::string& schedule, bool graph,
                                 UpdateMode update = UpdateMode::kAfter) const;

  /// Adds a timing, replacing an earlier one of the same size, schedule and
  /// mode.
  void add(TriedSchedule timing);
};

/// Formats `profile` as JSON.
std::string to_json(const CostProfile& profile);

/// Parses the output of to_json(). Throws c10::Error if `text` is not a
/// profile.
CostProfile profile_from_json(std::string_view text);

}  // namespace reprise
