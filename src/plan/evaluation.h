#pragma once

#include <reprise/plan/costs.h>
#include <reprise/plan/planner.h>
#include <reprise/plan/solver.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace reprise::detail {

/// Bytes at the peak of one micro-batch, what is there all the time included.
/// `first`: of a window, with no gradients of parameters there yet.
int64_t micro_batch_peak(const CostProfile& profile, const SizeCosts& size,
                         const Schedule& schedule, bool first);

/// What else is live if it runs as a CUDA graph: a second batch, which the graph reads,
/// what the update will take, which cannot be of the graph's memory, and what libraries
/// keep for the graph's second stream.
int64_t beside_graph(const CostProfile& profile, const SizeCosts& size);

/// All plans of one precision and one micro-batch size, with a CUDA graph or without,
/// and what each costs as a whole window. Solving takes long for long chains, so that
/// the solver is made when an answer first needs it; bounds need none.
class Evaluator {
 public:
  /// `strategy`: the only one allowed; empty: any schedule.
  Evaluator(const CostProfile& profile, int64_t micro_batch,
            int64_t global_batch, std::string strategy, bool graph);

  /// No plan's peak is lower than this.
  int64_t least_bytes() const { return least_bytes_; }
  /// No plan's window is predicted faster than this.
  double least_ms() const { return least_ms_; }

  /// The fastest whose peak stays within `budget`; nothing if none does.
  std::optional<Plan> fastest(int64_t budget) const;
  /// The one with the lowest peak.
  Plan smallest() const;
  /// Rising peak, falling time.
  std::vector<Plan> frontier(int points) const;
  Plan of_strategy(const std::string& strategy) const;
  Plan plan_of(const Schedule& schedule) const;
  /// The same plan, a micro-batch of which takes `micro_ms`.
  Plan with_time(Plan plan, double micro_ms) const;
  /// Whether no schedule lowers the plan's peak by more than a thousandth.
  bool is_floor(const Plan& plan) const;

  bool solved() const { return solver_ != nullptr; }
  /// What the solver takes; 0: there is none.
  int64_t solver_bytes() const;
  void drop_solver() { solver_.reset(); }
  /// Takes over the solver of an evaluator of the same size and the same costs.
  void take_solver(Evaluator& other) { solver_ = std::move(other.solver_); }

 private:
  PeakReport report(const Schedule& schedule, const Simulation& simulation,
                    int64_t peak_bytes) const;
  /// Whether gradients of parameters are there before the backward.
  bool gradients_stand() const { return graph_ || accumulate_ > 1; }
  ChainCosts with_gradients() const;
  int64_t base_bytes() const;
  /// Most outside of the chain: in the update, or while a batch is prepared.
  int64_t other_peak_bytes() const;
  int64_t update_peak_bytes() const;
  int64_t prepare_peak_bytes() const;
  const Solver& solver() const;
  void set_bounds();
  /// Everything kept, as long as nothing is faster and it fits.
  std::optional<Plan> everything_kept(int64_t budget) const;

  std::string precision_;
  std::vector<std::string> stages_;
  std::vector<int64_t> gradient_bytes_, held_twice_bytes_;
  FixedMemory fixed_;
  double update_ms_;
  int64_t update_bytes_;
  bool graph_;
  int64_t global_batch_;
  SizeCosts costs_, last_costs_;
  int64_t accumulate_;
  int64_t beside_graph_;  // 0: there is none
  std::string strategy_;
  int64_t least_bytes_ = 0;
  double least_ms_ = 0;
  double least_sum_ms_ = 0;  // of a micro-batch's stages
  mutable std::unique_ptr<const Solver> solver_;
};

}  // namespace reprise::detail
