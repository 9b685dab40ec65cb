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

/// Returns the peak of one micro-batch in bytes, including fixed memory.
/// `first` tells that it is the first one of a window, before the parameters'
/// gradients are allocated.
int64_t micro_batch_peak(const CostProfile& profile, const SizeCosts& size,
                         const Schedule& schedule, bool first);

/// Returns the peak of a micro-batch whose backward updates the parameters, including fixed
/// memory.
int64_t updating_peak(const CostProfile& profile, const SizeCosts& size,
                      const Schedule& schedule);

/// Returns the additional memory of a micro-batch that runs as a CUDA graph: the second copy
/// of the batch that the graph reads, the temporaries of the update and of the preparation
/// of the next batch, which cannot reuse the graph's memory, and library workspaces for the
/// graph's second stream. An update in the backward is part of the graph.
int64_t cuda_graph_extra_bytes(const CostProfile& profile,
                               const SizeCosts& size,
                               UpdateMode update = UpdateMode::kAfter);

/// Returns the costs of stages that run as a CUDA graph: the host launches no kernels.
ChainCosts without_launches(ChainCosts chain_costs);

/// Returns how micro-batches of plans with `update` are timed: with the update if all of them
/// have one, else without.
UpdateMode timed_update(const CostProfile& profile, UpdateMode update,
                        int64_t micro_batch, int64_t global_batch);

/// Returns the shortest predicted time of a window of `global_batch` samples, at any measured
/// size of micro-batches, if nothing is recomputed; 0 if nothing was measured.
double least_step_ms(const CostProfile& profile, int64_t global_batch);

/// Predicts memory and time of plans for one precision and micro-batch size,
/// with a CUDA graph or without. Solving is slow for long chains, so the solver
/// is created when it is first needed; the lower bounds do not need it. Tested
/// by tests/plan/planner_test.cpp.
class Evaluator {
 public:
  /// If `strategy` is not empty, only its schedule is allowed. `update`: kAfter or, for a
  /// window of one micro-batch and if parameters are in host memory, kBackward.
  Evaluator(const CostProfile& profile, int64_t micro_batch,
            int64_t global_batch, std::string strategy, bool graph,
            UpdateMode update = UpdateMode::kAfter);

  /// Lower bound on the peak of all plans, in bytes.
  int64_t min_peak_bytes() const { return min_peak_bytes_; }
  /// Lower bound on the predicted time of a window.
  double min_step_ms() const { return min_step_ms_; }

  /// Returns the fastest plan whose peak is at most `budget`, or nothing if
  /// none is. For `extra_bytes` see Plan.
  std::optional<Plan> fastest(int64_t budget, int64_t extra_bytes = 0) const;
  /// Returns the plan with the lowest peak.
  Plan smallest() const;
  /// Returns Pareto-optimal plans by ascending peak and descending time.
  std::vector<Plan> frontier(int points) const;
  /// Returns the plan with the schedule of `strategy`.
  Plan of_strategy(const std::string& strategy) const;
  Plan plan_of(const Schedule& schedule, int64_t extra_bytes = 0) const;
  /// Returns `plan` with `micro_ms` as the time of a micro-batch, and with these bytes beyond
  /// the prediction.
  Plan measured(const Plan& plan, double micro_ms, int64_t extra_bytes) const;
  /// Returns whether no schedule lowers the plan's peak by more than 0.1 %.
  bool is_floor(const Plan& plan) const;
  /// Returns what the predicted time of the plan's micro-batches depends on.
  TimeBound bound_of(const Plan& plan) const;

  bool solved() const { return solver_ != nullptr; }
  /// Memory of the solver's tables in bytes; 0 if there is no solver.
  int64_t solver_bytes() const;
  void drop_solver() { solver_.reset(); }
  /// Moves the solver from an evaluator with the same costs.
  void take_solver(Evaluator& other) { solver_ = std::move(other.solver_); }

 private:
  /// Parameters in host memory that are on the device while `stage` runs, with those of the
  /// next one.
  int64_t moved_at(int stage, bool backward) const;
  PeakReport report(const Schedule& schedule, const Simulation& simulation,
                    int64_t peak_bytes) const;
  /// Whether the parameters' gradients are allocated before the backward pass.
  bool gradients_allocated() const {
    return !in_backward() && (graph_ || accumulate_ > 1);
  }
  /// Time of an update, in the backward or after it.
  double update_ms() const;
  /// Whether every micro-batch updates the parameters in its backward. Otherwise the last one
  /// of a window does, if any.
  bool in_backward() const {
    return update_ == UpdateMode::kBackward && accumulate_ == 1;
  }
  ChainCosts with_gradients() const;
  int64_t base_bytes() const;
  /// Peak outside of the chain, in the update or while a batch is prepared.
  int64_t other_peak_bytes() const;
  int64_t update_peak_bytes() const;
  int64_t prepare_peak_bytes() const;
  const Solver& solver() const;
  void set_bounds();
  /// Returns the plan that keeps all stages, if it fits and no other one is
  /// faster.
  std::optional<Plan> everything_kept(int64_t budget,
                                      int64_t extra_bytes) const;

  CostProfile profile_;  // without sizes and timings
  FixedMemory fixed_;    // with the workspaces of the micro-batch
  bool graph_;
  UpdateMode update_;
  int64_t global_batch_;
  SizeCosts costs_, last_costs_;
  int64_t accumulate_;
  int64_t cuda_graph_extra_bytes_;  // 0 without a CUDA graph
  std::string strategy_;
  int64_t min_peak_bytes_ = 0;
  double min_step_ms_ = 0;
  double min_stages_ms_ = 0;  // lower bound on the time of the chain
  mutable std::unique_ptr<const Solver> solver_;
};

}  // namespace reprise::detail
