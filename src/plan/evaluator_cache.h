#pragma once

#include "plan/evaluator.h"

#include <reprise/plan/planner.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace reprise::detail {

/// Precision, micro-batch size, whether micro-batches run as a CUDA graph, and when
/// parameters are updated. Tested by tests/plan/planner_test.cpp.
using CandidateKey = std::tuple<Precision, int64_t, bool, UpdateMode>;

inline CandidateKey key_of(const Plan& plan) {
  return {plan.precision, plan.micro_batch, plan.graph, plan.update};
}

/// Caches the evaluators of one request and their results. An evaluator is
/// recreated when more sizes have been measured, but keeps its solver if its
/// own costs did not change.
class EvaluatorCache {
 public:
  /// `budget` is the maximum peak of fastest() in bytes. Holds references to
  /// the other arguments.
  EvaluatorCache(const PlanRequest& request, CostSource& costs, int64_t budget);

  const Evaluator& evaluator(const CandidateKey& key) {
    return *entry(key).evaluator;
  }
  /// See the methods of Evaluator.
  const std::optional<Plan>& fastest(const CandidateKey& key);
  const Plan& smallest(const CandidateKey& key);
  std::vector<Plan> frontier(const CandidateKey& key, int points);
  bool is_floor(const Plan& plan);
  TimeBound bound_of(const Plan& plan) {
    return entry(key_of(plan)).evaluator->bound_of(plan);
  }
  /// Returns the predicted plan for a schedule given as Schedule::to_text().
  const Plan& plan_of(const CandidateKey& key, const std::string& schedule);

  /// Returns whether the micro-batch size was measured at this precision.
  bool measured(const CandidateKey& key) const;
  /// Returns whether the evaluator has a solver.
  bool solved(const CandidateKey& key) {
    return entry(key).evaluator->solved();
  }

  /// Returns all plans that were tried, for any request, with what was measured.
  std::vector<Plan> tried(const CandidateKey& key);
  /// Returns `plan` as it was measured. If it was not tried, corrects its
  /// prediction by the errors for the tried plan of the same size whose peak
  /// is nearest.
  Plan calibrated(const Plan& plan);

 private:
  struct Entry {
    size_t sizes = 0;      // number of sizes measured when it was created
    bool exact = false;    // whether its own size was one of them
    double update_ms = 0;  // when it was created
    std::unique_ptr<Evaluator> evaluator;
    std::optional<std::optional<Plan>> fastest;
    int64_t fastest_extra_bytes = 0;  // that it was computed with
    std::optional<Plan> smallest;
    std::map<std::string, Plan> plans;
    int64_t last_use = 0;
  };
  struct Trial {
    double ms = 0;            // of a micro-batch
    int64_t extra_bytes = 0;  // see TriedSchedule
  };
  using Trials = std::map<std::string, Trial>;  // by Schedule::to_text()

  Entry& entry(const CandidateKey& key);
  Trials trials(const CandidateKey& key) const;
  /// Bytes beyond the prediction of the tried plan whose peak is nearest to `peak_bytes`; 0 if
  /// they hardly matter.
  int64_t extra_near(const CandidateKey& key, int64_t peak_bytes);
  /// The most bytes beyond predictions at the nearest size that was tried.
  int64_t extra_of_other_sizes(const CandidateKey& key);
  /// Destroys the least recently used solvers, except that of `current`, if all
  /// solvers together take too much memory.
  void limit_solvers(const Entry& current);

  const PlanRequest& request_;
  CostSource& costs_;
  int64_t budget_;
  int64_t uses_ = 0;
  std::map<CandidateKey, Entry> entries_;
};

}  // namespace reprise::detail
