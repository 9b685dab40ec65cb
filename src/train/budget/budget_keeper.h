#pragma once

#include "train/step/gradients.h"
#include "train/step/oom_retry.h"
#include "train/step/ranks.h"
#include "train/step/step_runner.h"
#include "train/step/train_setup.h"
#include "train/step/window_exchange.h"

#include <reprise/memory/meter.h>
#include <reprise/train/planning.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace reprise::detail {

/// Keeps a training within its memory budget: plans it before the first window,
/// and plans again if the peak of a window exceeds the budget or an allocation
/// fails. Without a budget, the free memory of a CUDA device is the budget if the
/// training is long or does not fit without a plan. If the schedule is given, it does
/// nothing.
///
/// Rank 0 plans; the other ranks adopt its plans.
///
/// Tested by tests/train/budget/budget_test.cpp.
class BudgetKeeper {
 public:
  struct Parts {
    TrainSetup& setup;  ///< a plan changes the sizes in its options
    Ranks& ranks;
    WindowExchange& exchange;
    StepRunner& runner;
    Gradients& gradients;
    OomRetry& retry;
    std::function<void(const std::string&)> warn;
    /// Called after a plan was adopted. `sizes` is true if the micro-batch
    /// or the weight copies changed, which a resumed run must know.
    std::function<void(bool sizes)> adopted;
  };
  explicit BudgetKeeper(Parts parts);

  /// Makes and adopts the first plan if the options ask for a plan, `planner` is
  /// given, or a plan for the free memory pays off. If nothing fits, throws c10::Error
  /// with the smallest budget that works.
  void plan(std::unique_ptr<BudgetPlanner> planner,
            const PlanningOptions& options);

  /// Excludes plans that update parameters in the backward, because something needs the
  /// complete gradients. Plans again if the current plan does. Throws c10::Error if nothing
  /// else fits.
  void require_complete_gradients();

  /// Whether the schedule comes from a planner, on this rank or on rank 0.
  bool planned() const { return current_.has_value(); }
  /// The plan in force; nullopt if the training has none.
  const std::optional<Plan>& current() const { return current_; }
  /// Predicted peak of the current plan, including the memory of the
  /// exchange between ranks.
  int64_t predicted_peak_bytes() const;
  /// Predicted time of a window with the reduction of its gradients.
  double predicted_step_ms() const;
  int64_t replans() const { return replans_; }

  void begin_window();
  /// Called after update `step`. Plans again if the peak of its window exceeded
  /// the budget, or if it `ran_out` of memory and continued. Returns true if the micro-batch
  /// may have changed.
  bool end_window(int64_t step, bool ran_out);
  /// Plans again after an allocation failure in a window.
  void tighten_after_failure();

 private:
  PlanRequest request() const;
  /// Whether to plan a training that has no budget. The ranks agree.
  bool worth_planning();
  /// Free memory of the device, of the rank that has the least.
  int64_t free_bytes();
  /// Returns the plan of rank 0 on all ranks; nullopt if it has none.
  std::optional<Plan> broadcast(std::optional<Plan> own) const;
  void adopt(Plan plan);
  /// Throws c10::OutOfMemoryError if parameters could not leave host memory.
  void check_room_on_device(StatePlace place) const;
  /// Plans again with all state on the device, because the host has no room for it.
  void adopt_without_host();
  /// Disables CUDA graphs if they do not fit in the plan.
  void fit_graphs();
  /// Adopts a plan that needs less memory. Returns false if there is none.
  bool tighten(int64_t over_bytes);
  /// Runs `body`, which may run the model, and restores the model's state.
  void measuring(const std::function<void()>& body);

  Parts parts_;
  std::unique_ptr<BudgetPlanner>
      planner_;  // null: given schedule, or another rank's
  std::optional<Plan> current_;
  MemoryMeter window_meter_;
  Network reducing_, gathering_, between_;  // what ranks measured
  int64_t limit_ = 0;                       // the budget in bytes
  int64_t replans_ = 0;
  PlanningOptions planning_;
  bool complete_gradients_ = false;  // no updates in the backward
  bool exhausted_ = false;  // even the smallest plan exceeds the budget
};

}  // namespace reprise::detail
