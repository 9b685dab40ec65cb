#pragma once

#include <reprise/recompute/simulate.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reprise {

/// Bytes that are there whatever the micro-batch and the schedule.
struct FixedMemory {
  int64_t parameters = 0;  ///< and buffers
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t data = 0;       ///< what the dataset holds on the device
  int64_t workspace = 0;  ///< sums, and what libraries keep whatever runs

  int64_t total() const {
    return parameters + gradients + optimizer + data + workspace;
  }
};

/// What one micro-batch of a given size costs.
struct SizeCosts {
  int64_t micro_batch = 0;
  ChainCosts figures;
  int64_t data_bytes = 0;  ///< the batch itself, and those read ahead
  /// Most live while a batch is prepared, before its chain runs: those read ahead and
  /// temporaries included.
  int64_t prepare_bytes = 0;
  /// What libraries such as cuBLAS keep once it ran, and, for its graph alone, besides.
  int64_t workspace_bytes = 0;
  int64_t graph_workspace_bytes = 0;
  /// Time outside the chain: moving and preparing the batch.
  double other_ms = 0;
  /// Time of a whole micro-batch over the sum of its stages' times: where each
  /// stage has a graph of its own, and where one graph is all of them. The first
  /// is larger, since the host starts a backward for each.
  double cut_factor = 1;
  double joined_factor = 1;
};

/// What a micro-batch took by a schedule, run as a training runs it.
struct TriedSchedule {
  int64_t micro_batch = 0;
  std::string schedule;  ///< Schedule::to_text()
  double ms = 0;
  bool graph = false;  ///< as a CUDA graph
  /// Those with the same number above 0 were timed in turn, so that their times
  /// compare; 0: by itself, under whatever load the machine had.
  int64_t row = 0;
};

/// What a training costs, measured at some sizes of the micro-batch. Plain
/// data.
struct CostProfile {
  std::string key;  ///< model, shapes, precision, device and versions
  std::string precision;
  std::vector<std::string> stages;  ///< names
  /// Of parameters, by the stage whose backward makes their gradient first; and of
  /// these, the ones whose gradient is there twice from that backward to the end of the
  /// micro-batch, beside the sum so far: those that other stages use too (tied weights),
  /// and those of SmallGradients.
  std::vector<int64_t> gradient_bytes;
  std::vector<int64_t> held_twice_bytes;
  FixedMemory fixed;
  double update_ms = 0;      ///< the optimizer's step
  int64_t update_bytes = 0;  ///< its temporaries
  /// Whether a micro-batch runs as a CUDA graph: "off", "auto" (where it fits), "on".
  /// Nobody else can have its memory, so the update's temporaries and a second place
  /// for the batch come on top of it, and gradients stay from window to window.
  std::string graph = "off";
  std::vector<SizeCosts> sizes;  ///< rising
  std::vector<TriedSchedule> tried{};

  bool measured(int64_t micro_batch) const;

  /// As measured; between two sizes a straight line; beyond the last, and below
  /// the first, the line of the nearest two. Throws c10::Error where nothing was
  /// measured.
  SizeCosts at(int64_t micro_batch) const;

  /// Adds a size, or replaces what was measured at it.
  void add(SizeCosts costs);

  /// Null if that schedule was not tried at that size, with or without a graph.
  const TriedSchedule* find_tried(int64_t micro_batch,
                                  const std::string& schedule,
                                  bool graph) const;
  /// Its time; nothing if it was not tried.
  std::optional<double> tried_ms(int64_t micro_batch,
                                 const std::string& schedule, bool graph) const;

  /// Adds what was tried, or replaces what is known of the same.
  void add(TriedSchedule one);
};

std::string to_json(const CostProfile& profile);

/// Throws c10::Error where the text is no profile.
CostProfile profile_from_json(std::string_view text);

}  // namespace reprise
