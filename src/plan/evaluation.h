#pragma once

#include <reprise/plan/costs.h>
#include <reprise/plan/planner.h>
#include <reprise/plan/solver.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace reprise::plan_detail {

/// Bytes at the peak of one micro-batch, what is there all the time included.
/// `first`: of a window, with no gradients of parameters there yet.
int64_t micro_batch_peak(const CostProfile& profile, const SizeCosts& size,
                         const Schedule& schedule, bool first);

/// What else is live where it runs as a CUDA graph: a second batch, which the graph reads,
/// and what the update will take, which cannot be of the graph's memory.
int64_t beside_graph(const CostProfile& profile, const SizeCosts& size);

/// All plans of one precision and one micro-batch size, with a CUDA graph or without:
/// solves its schedules once and says what each costs as a whole window.
class Evaluator {
 public:
  /// `strategy`: the only one allowed; empty: any schedule.
  Evaluator(const CostProfile& profile, int64_t micro_batch,
            int64_t global_batch, std::string strategy, bool graph);

  /// The fastest whose peak stays within `budget`; nothing where none does.
  std::optional<Plan> fastest(int64_t budget) const;
  /// The one with the lowest peak.
  Plan smallest() const;
  /// Rising peak, falling time.
  std::vector<Plan> frontier(int points) const;
  Plan of_strategy(const std::string& strategy) const;
  Plan plan_of(const Schedule& schedule) const;
  /// The same plan, a micro-batch of which takes `micro_ms`.
  Plan with_time(Plan plan, double micro_ms) const;

 private:
  PeakReport report(const Schedule& schedule, const Simulation& simulation,
                    int64_t peak_bytes, bool in_update) const;
  /// Whether gradients of parameters are there before the backward.
  bool gradients_stand() const { return graph_ || accumulate_ > 1; }
  ChainFigures with_gradients() const;
  int64_t base_bytes() const;

  std::string precision_;
  std::vector<std::string> stages_;
  std::vector<int64_t> gradient_bytes_, tied_bytes_;
  FixedMemory fixed_;
  double update_ms_;
  int64_t update_bytes_;
  bool graph_;
  int64_t global_batch_;
  SizeCosts costs_, last_costs_;
  int64_t accumulate_;
  int64_t beside_graph_;  // 0: there is none
  std::string strategy_;
  std::optional<Solver> solver_;
};

}  // namespace reprise::plan_detail
