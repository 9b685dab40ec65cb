#pragma once

#include <reprise/plan/costs.h>
#include <reprise/recompute/schedule.h>
#include <reprise/recompute/strategy.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Finds the micro-batch size, the number of accumulation steps, the precision
/// and the schedule that train fastest for a given global batch size within a
/// memory budget.
namespace reprise {

struct Plan;

/// Provides costs to the planner. Training measures them; tests can make them
/// up.
class CostSource {
 public:
  virtual ~CostSource() = default;

  /// Returns the costs measured so far at `precision`.
  virtual const CostProfile& profile(Precision precision) = 0;

  /// Measures a micro-batch size unless it has been measured already. Returns
  /// false if the device runs out of memory. Throws c10::Error if the model
  /// cannot run at this size, as BatchNorm cannot with one value per channel.
  virtual bool measure(Precision precision, int64_t micro_batch) = 0;

  /// Runs micro-batches by `plan` as in training, including copying and
  /// preparing the data. Returns the milliseconds per micro-batch and adds them
  /// to the profile. Returns nothing if the plan cannot be run: the device runs
  /// out of memory, or the source does not run anything.
  virtual std::optional<double> try_plan(const Plan& /*plan*/) {
    return std::nullopt;
  }

  /// Times plans that were tried before once more, alternately, so that changes
  /// of the machine's load affect all of them. Adds the times to the profile
  /// with one common TriedSchedule::comparison. Returns false if the source
  /// does not support this.
  virtual bool compare(const std::vector<Plan>& /*plans*/) { return false; }
};

struct PlanRequest {
  int64_t global_batch = 1;  ///< samples per optimizer update
  int64_t memory = 0;        ///< budget in bytes; 0 for no limit
  /// Precisions to choose from.
  std::vector<Precision> precisions{Precision::kFp32};
  int64_t micro_batch = 0;  ///< 0 to choose one
  /// Strategy to use, such as "sqrt"; empty for an optimal schedule.
  std::string strategy{};
  /// Fraction of the budget to leave free for errors of the prediction. Of the budget without
  /// weights and optimizer state, whose size is known.
  double margin = 0.02;
  /// Time of a window with another plan that fits: plans that are predicted to take much longer
  /// are not tried. 0: there is none.
  double rival_ms = 0;
  /// Whether to compute the frontier, the references and the peak reductions of
  /// the result, which only displays need.
  bool explain = true;
};

/// Where the peak occurs, and the memory that is live at that point.
struct PeakReport {
  /// "forward", "recompute", "backward", "update" or "preparation of a batch".
  std::string phase;
  int stage = -1;  ///< -1 if no stage is running, as in the update
  std::string stage_name;
  /// Bytes per category. Together with `kept`, `in_flight` and `workspace` they
  /// add up to the peak.
  int64_t parameters = 0, gradients = 0, optimizer = 0, data = 0;
  int64_t kept = 0;                    ///< kept activations
  std::vector<int64_t> kept_by_stage;  ///< kept activations by producing stage
  int64_t in_flight = 0;               ///< gradients of activations
  int64_t workspace = 0;               ///< temporaries and library workspaces
  /// Whether no schedule has a lower peak at this micro-batch size. Known only
  /// with PlanRequest::explain.
  bool is_floor = false;

  bool operator==(const PeakReport&) const = default;
};

/// Bytes of a training's state in host memory.
struct HostState {
  int64_t parameters = 0, gradients = 0, optimizer = 0;

  int64_t total() const { return parameters + gradients + optimizer; }
  bool operator==(const HostState&) const = default;
};

/// Settings for training, and their predicted costs. The trainer adopts a plan
/// unchanged, and ranks send it to each other as JSON.
struct Plan {
  int64_t global_batch = 0;  ///< 0: not stated, in plans of the caller
  int64_t micro_batch = 0;
  int64_t accumulate = 0;        ///< micro-batches per window
  int64_t last_micro_batch = 0;  ///< size of the last micro-batch of a window
  Precision precision = Precision::kFp32;
  Schedule schedule;

  int64_t peak_bytes = 0;
  /// Part of the peak that was not predicted but measured when this or a similar plan was
  /// tried; may be negative. See TriedSchedule.
  int64_t extra_bytes = 0;
  int64_t kept_bytes = 0;  ///< kept after the forward pass
  int64_t host_bytes = 0;  ///< maximum of activations in host memory
  double micro_ms = 0;     ///< one micro-batch; measured if the plan was tried
  double step_ms = 0;      ///< one window, including the optimizer update
  PeakReport peak{};
  bool graph = false;  ///< whether micro-batches run as a CUDA graph
  /// When parameters are updated: kAfter or kBackward. With kBackward the time of a
  /// micro-batch includes the update.
  UpdateMode update = UpdateMode::kAfter;
  StatePlace state = StatePlace::kDevice;  ///< not kAuto
  /// With kHost, the share of the optimizer's state in host memory.
  double host_share = 1;
  HostState host_state{};
  /// Known only with PlanRequest::explain.
  TimeBound bound = TimeBound::kArithmetic;
  /// Weight copies that the plan assumes; nullopt for the configured mode.
  std::optional<WeightCopiesMode> weight_copies{};
  /// Settings that the plan was measured with; nullopt for the configured ones.
  std::optional<DeviceSettings> settings{};

  bool operator==(const Plan&) const = default;
};

/// Memory and time of one window under some plan.
struct FrontierPoint {
  int64_t peak_bytes = 0;
  double step_ms = 0;
  int64_t micro_batch = 0;
  /// A strategy without a number; none for the optimal schedule.
  std::optional<StrategyKind> strategy{};
};

/// A change that lowers the peak, and its effect.
struct PeakReduction {
  std::string what;  ///< such as "micro-batch 4 instead of 8"
  int64_t peak_bytes = 0;
  double step_ms = 0;  ///< 0 if unknown
};

/// The plan for a request, with alternatives and an explanation.
struct PlanResult {
  PlanRequest request;
  bool feasible = false;  ///< whether a plan fits into the budget
  /// The fastest plan that fits, or the one with the lowest peak if none fits.
  Plan plan;
  /// Plans that fit at other micro-batch sizes that were measured, fastest
  /// first.
  std::vector<Plan> alternatives;
  /// Fastest plan for each amount of memory, by ascending memory and descending
  /// time.
  std::vector<FrontierPoint> frontier;
  /// Common strategies (none, all, sqrt) at the plan's micro-batch size and at
  /// the global batch size, for comparison.
  std::vector<FrontierPoint> references;
  /// Changes that would lower the peak.
  std::vector<PeakReduction> peak_reductions;
  std::vector<std::string> stages;  ///< names of the stages
  int64_t smallest_bytes = 0;  ///< smallest budget that some plan fits into
};

/// Finds the best plan for `request`. Measures the costs it needs and times the
/// plans it considers, if `costs` supports that. The result is the fastest plan
/// that fits of all that were ever timed with this source. For one source, a
/// later result for a larger budget is therefore never slower than an earlier
/// one for a smaller budget.
///
/// A budget that nothing fits into is no error; see PlanResult::feasible.
/// Throws c10::Error if the request is not valid or if not even the smallest
/// micro-batch can be measured.
PlanResult make_plan(const PlanRequest& request, CostSource& costs);

/// Measured memory and time of training with a plan.
struct PlanMeasurement {
  int64_t peak_bytes = 0;
  double step_ms = 0;         ///< median
  double step_ms_spread = 0;  ///< half of the interquartile range
};

/// Formats a result for display in at most 100 columns: the plan, memory per
/// category as bars, the cause of the peak and changes that lower it, the
/// schedule drawn over the chain, the frontier and the alternatives. If
/// `measured` is given, it is compared with the prediction.
std::string to_text(const PlanResult& result,
                    const std::optional<PlanMeasurement>& measured = {});

/// Formats a plan as JSON, with the fields from `micro_batch` to `peak_at`
/// below.
std::string to_json(const Plan& plan);

/// Parses the output of to_json(Plan) for a chain of `stages` stages. Throws
/// c10::Error if `text` is not such a plan.
Plan plan_from_json(const std::string& text, int stages);

/// Returns one line for the user: sizes, recomputed stage runs and memory.
std::string describe(const Plan& plan);

/// Formats a result as JSON with the fields
///
///     feasible, budget (null for none), smallest_bytes
///     micro_batch, accumulate, last_micro_batch, global_batch, precision
///     recompute (a strategy or "optimal"), schedule
///     weight_copies, layout, autotune (only if the plan assumes a value)
///     graph, update, state, runs_again
///     predicted {peak_bytes, kept_bytes, host_bytes,
///                host_state {parameters, gradients, optimizer}, step_ms,
///                micro_ms, bound, samples_per_s}
///     memory {parameters, gradients, optimizer, data, activations,
///             gradients_in_flight, workspace}
///     peak_at {phase, stage, stage_name, kept_by_stage, is_floor}
///     measured {peak_bytes, step_ms, step_ms_spread} (only if given)
///     alternatives [plans]
///     frontier, references [{recompute, micro_batch, peak_bytes, step_ms}]
///     peak_reductions [{what, peak_bytes, step_ms}]
///     stages [names]
std::string to_json(const PlanResult& result,
                    const std::optional<PlanMeasurement>& measured = {});

}  // namespace reprise
