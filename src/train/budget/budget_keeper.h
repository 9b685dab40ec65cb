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

/// Keeps a training within its memory budget: plans it before the first window, and plans
/// again if a window's peak passes the budget or an allocation fails. Without a budget or
/// with a given schedule it does nothing.
///
/// Rank 0 plans; the others adopt its decisions.
class BudgetKeeper {
 public:
  struct Parts {
    TrainSetup& setup;  ///< decisions change its sizes
    Ranks& ranks;
    WindowExchange& exchange;
    StepRunner& runner;
    Gradients& gradients;
    OomRetry& retry;
    std::function<void(const std::string&)> warn;
    /// Called after a decision was adopted; `sizes`: with another micro-batch or other
    /// weight copies, which a resumed run must know.
    std::function<void(bool sizes)> adopted;
  };
  explicit BudgetKeeper(Parts parts);

  /// Makes and adopts the first decision if the options ask for a plan or `planner` is
  /// given. Throws c10::Error with the smallest budget that works if nothing fits.
  void plan(std::unique_ptr<BudgetPlanner> planner,
            const PlanningOptions& options);

  /// Whether the schedule comes from a planner, on this rank or on rank 0.
  bool planned() const { return decision_.has_value(); }
  const std::optional<BudgetPlanner::Decision>& decision() const {
    return decision_;
  }
  /// Includes what the exchange between ranks takes.
  int64_t predicted_peak_bytes() const;
  int64_t replans() const { return replans_; }

  void begin_window();
  /// After update `step`: plans again if its peak passed the budget. Returns true if the
  /// micro-batch changed.
  bool end_window(int64_t step);
  /// After an allocation failure in a window.
  void tighten_after_failure();

 private:
  PlanRequest request() const;
  /// Rank 0's decision on all ranks; nothing if it has none.
  std::optional<BudgetPlanner::Decision> broadcast(
      std::optional<BudgetPlanner::Decision> own) const;
  void adopt(BudgetPlanner::Decision decision);
  /// Gives up CUDA graphs that the plan has no room for.
  void fit_graphs();
  /// False if no smaller plan is left.
  bool tighten(int64_t over_bytes);
  /// Runs `body`, which may run the model, and undoes what that changed.
  void measuring(const std::function<void()>& body);

  Parts parts_;
  std::unique_ptr<BudgetPlanner>
      planner_;  // null: given schedule, or another rank's
  std::optional<BudgetPlanner::Decision> decision_;
  MemoryMeter window_meter_;
  int64_t replans_ = 0;
  bool exhausted_ = false;  // even the smallest plan passes the budget
};

}  // namespace reprise::detail
