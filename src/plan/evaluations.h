#pragma once

#include "plan/evaluation.h"

#include <reprise/plan/planner.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace reprise::detail {

/// A precision and a micro-batch size, with a CUDA graph or without.
using Key = std::tuple<std::string, int64_t, bool>;

inline Key key_of(const Plan& plan) {
  return {plan.precision, plan.micro_batch, plan.graph};
}

/// The evaluators of one request, and what they answered: made again when more was
/// measured, but solved again only if that changed their costs.
class Evaluations {
 public:
  /// `budget`: what `fastest` stays within.
  Evaluations(const PlanRequest& request, CostSource& costs, int64_t budget);

  const Evaluator& of(const Key& key) { return *entry(key).evaluator; }
  const std::optional<Plan>& fastest(const Key& key);
  const Plan& smallest(const Key& key);
  std::vector<Plan> frontier(const Key& key, int points);
  bool is_floor(const Plan& plan);
  /// As predicted, by Schedule::to_text().
  const Plan& plan_of(const Key& key, const std::string& schedule);

  bool measured(const Key& key) const;
  bool solved(const Key& key) { return entry(key).evaluator->solved(); }

  using Times = std::map<std::string, double>;  // by the schedule's text
  /// What was tried, for whatever request.
  Times times_of(const Key& key) const;
  /// A plan with the time it was tried with. If it was not, as far off as the
  /// one tried at its size that needs about as much memory.
  Plan likely(const Plan& plan);

 private:
  struct Entry {
    size_t known = 0;  // sizes that were measured when it was made
    bool exact = false;
    std::unique_ptr<Evaluator> evaluator;
    std::optional<std::optional<Plan>> fastest;
    std::optional<Plan> smallest;
    std::map<std::string, Plan> plans;
    int64_t used = 0;
  };
  Entry& entry(const Key& key);
  /// Drops the solvers used longest ago if all take too much memory.
  void limit_solvers(const Entry& present);

  const PlanRequest& request_;
  CostSource& costs_;
  int64_t budget_;
  int64_t uses_ = 0;
  std::map<Key, Entry> entries_;
};

}  // namespace reprise::detail
