#pragma once

#include "train/budget/training_costs.h"

#include <reprise/plan/planner.h>

#include <compare>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

namespace reprise::detail {

/// make_plan() with the place of the state that `costs` was measured with.
PlanResult plan_with(TrainingCosts& costs, const PlanRequest& request);

/// Costs of a training in the ways that its options leave open. Weight copies are used, and the
/// optimizer's state is on the device, as far as the options allow it. If the budget is tight,
/// also costs with copies that take no memory, and with the optimizer's state or the parameters
/// as well in host memory, which may save more time elsewhere. Tested by
/// tests/train/budget/state_planning_test.cpp, parameters_planning_test.cpp and
/// planning_test.cpp there.
class CostChoice {
 public:
  CostChoice(TrainSetup setup, TrainingCosts::Options options);
  CostChoice(const CostChoice&) = delete;
  CostChoice& operator=(const CostChoice&) = delete;

  /// Returns the best plan. With `present`, the plan in force, the state stays where it is.
  PlanResult plan(const PlanRequest& request, const Plan* present = nullptr);

  /// The costs with the options as they are.
  CostSource& usual() { return *usual_; }

 private:
  struct Way {
    WeightCopiesMode copies;
    StatePlace state;
    double host_share = 1;  // see Plan

    auto operator<=>(const Way&) const = default;
  };

  PlanResult choose(const PlanRequest& request, const Plan* present);
  /// Plans with the options as they are. If they ask for host memory and it has no room, the
  /// optimizer's state stays on the device from now on.
  PlanResult plan_usual(const PlanRequest& request);
  void choose_copies(const PlanRequest& request, bool tight, PlanResult& best);
  /// Compares `best`, if there is one, with plans that keep a part of the optimizer's state on
  /// the device, if it is in host memory.
  void choose_share(const std::function<void(const Way&)>& consider,
                    const std::optional<PlanResult>& best) const;
  /// Compares `best`, if there is one, with plans that have state in host memory.
  void choose_state(const PlanRequest& request, bool tight,
                    std::optional<PlanResult>& best);
  /// Lower bound of the time of a window with the optimizer's state in host memory: without
  /// recomputation, and a part of it copied one way. 0 if it is not known.
  double least_host_ms(const PlanRequest& request);
  bool fits_in_host(const PlanResult& result) const;
  bool may_move_parameters(const PlanRequest& request) const;
  /// Whether parameters and the optimizer's state alone exceed the budget.
  bool is_hopeless(TrainingCosts& costs, const PlanRequest& request) const;
  /// From now on a training has its state; see TrainingCosts::begin_training().
  void begin_training();
  /// Whether micro-batches take the same time as usual.
  bool has_usual_steps(const Way& way) const;
  /// Of the costs with usual micro-batches, those with most measurements.
  const TrainingCosts* most_measured() const;
  /// Null if there are none and `create` is false.
  TrainingCosts* costs_with(const Way& way, bool create);

  bool free_copies_;
  bool free_state_;
  TrainSetup setup_;
  TrainingCosts::Options options_;
  std::optional<TrainingCosts> usual_;
  std::map<Way, std::unique_ptr<TrainingCosts>> others_;
  LinkSpeed link_;  // 0: not measured yet
};

}  // namespace reprise::detail
