#pragma once

#include <reprise/plan/costs.h>
#include <reprise/recompute/schedule.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Given a global batch and a memory budget: the micro-batch, the accumulation,
/// the precision and the schedule that train fastest and fit.
namespace reprise {

struct Plan;

/// Where costs come from: measurements, or figures in a test.
class CostSource {
 public:
  virtual ~CostSource() = default;

  /// What is known so far, at this precision ("fp32", "bf16", "fp16").
  virtual const CostProfile& profile(const std::string& precision) = 0;

  /// Measures a micro-batch size, if it is not known. False where the device has
  /// no room for it. Throws c10::Error where the model cannot run it at all, as
  /// BatchNorm cannot with one value a channel.
  virtual bool measure(const std::string& precision, int64_t micro_batch) = 0;

  /// Milliseconds of one micro-batch by this plan, as it runs in the middle of a
  /// training, its batch moved and prepared; in the profile from then on. Nothing
  /// where it cannot be tried: there is no room for it, or the source has nothing
  /// but figures.
  virtual std::optional<double> try_plan(const Plan& /*plan*/) {
    return std::nullopt;
  }

  /// Times plans that were tried before once more, in turn, so that no change of the
  /// machine's load decides between them; in the profile from then on, with one
  /// TriedSchedule::row. False if the source cannot.
  virtual bool compare(const std::vector<Plan>& /*plans*/) { return false; }
};

struct PlanRequest {
  int64_t global_batch = 1;
  int64_t memory = 0;                           ///< bytes; 0: no limit
  std::vector<std::string> precisions{"fp32"};  ///< to choose from
  int64_t micro_batch = 0;                      ///< 0: to be chosen
  std::string strategy;  ///< such as "sqrt"; empty: optimal
  /// Share of the budget left free: predictions are that good.
  double margin = 0.02;
  /// Also the frontier, the references and what would lower the peak. A training
  /// that plans under way has no use for them, and perhaps no memory to measure
  /// another precision in.
  bool explain = true;
};

/// The moment of the peak, and what is live there.
struct PeakReport {
  /// "forward", "recompute", "backward", "update", "preparation of a batch"
  std::string phase;
  int stage = -1;  ///< -1: none, as in the update
  std::string stage_name;
  /// In bytes; together the peak.
  int64_t parameters = 0, gradients = 0, optimizer = 0, data = 0;
  int64_t kept = 0;                    ///< activations
  std::vector<int64_t> kept_by_stage;  ///< by the stage that made them
  int64_t in_flight = 0;               ///< gradients of activations
  int64_t workspace = 0;
  /// True where no schedule lowers it at this micro-batch.
  bool is_floor = false;
};

/// What to set, and what to expect of it.
struct Plan {
  int64_t global_batch = 0;
  int64_t micro_batch = 0;
  int64_t accumulate = 0;
  int64_t last_micro_batch = 0;  ///< of a window; the others are equal
  std::string precision{};
  Schedule schedule;

  int64_t peak_bytes = 0;
  int64_t kept_bytes = 0;  ///< held after the forward
  int64_t host_bytes = 0;  ///< most held in the host's memory instead
  double micro_ms = 0;     ///< one micro-batch; as tried, where it was
  double step_ms = 0;      ///< a whole window with its update
  PeakReport peak{};
  bool graph = false;  ///< counts on a CUDA graph of the micro-step
  /// The training's --weight-copies that it counts on; empty: as configured.
  std::string weight_copies{};
};

/// A point of time against memory, for the whole window.
struct FrontierPoint {
  int64_t peak_bytes = 0;
  double step_ms = 0;
  int64_t micro_batch = 0;
  std::string label;  ///< "none", "all", "sqrt"; empty: optimal
};

/// One thing that lowers the peak, and to what.
struct PeakReduction {
  std::string what;  ///< "micro-batch 4 instead of 8"
  int64_t peak_bytes = 0;
  double step_ms = 0;  ///< 0: not known
};

struct PlanResult {
  PlanRequest request;
  bool feasible = false;
  /// Where nothing fits: the one that needs least.
  Plan plan;
  /// Other choices that fit, the fastest first: another micro-batch each, of those
  /// that were measured.
  std::vector<Plan> alternatives;
  /// Best time for every memory, rising memory, falling time.
  std::vector<FrontierPoint> frontier;
  /// What people set by hand (none, all, sqrt) at the plan's micro-batch and at
  /// the whole global batch.
  std::vector<FrontierPoint> references;
  /// What sets the peak and what would lower it.
  std::vector<PeakReduction> measures;
  std::vector<std::string> stages;  ///< names
  int64_t smallest_bytes = 0;       ///< below this nothing fits
};

/// Throws c10::Error on a request that makes no sense. Measures what it needs and
/// tries what it chooses, where `costs` can: the plan is the fastest of all that
/// were tried so far, for whatever request, and fit into this one. So of the
/// answers of one source a later one with more memory is never slower than an
/// earlier one with less.
PlanResult make_plan(const PlanRequest& request, CostSource& costs);

/// What a training by a plan took.
struct PlanMeasurement {
  int64_t peak_bytes = 0;
  double step_ms = 0;         ///< median
  double step_ms_spread = 0;  ///< half the distance of the quartiles
};

/// For people: the plan, memory by category as bars, what sets the peak and what
/// lowers it, the schedule drawn over the chain, the frontier, alternatives. At
/// most 100 columns. With `measured` also that against what was predicted.
std::string to_text(const PlanResult& result,
                    const std::optional<PlanMeasurement>& measured = {});

/// One plan as JSON: its part of what follows, down to `predicted`.
std::string to_json(const Plan& plan);

/// The same as JSON: feasible, budget (null: none), smallest_bytes; the plan's
/// micro_batch, accumulate, last_micro_batch, global_batch, precision, recompute
/// (a strategy, or "optimal"), schedule, weight_copies (where the plan counts on a
/// certain one), graph, runs_again and predicted{peak_bytes, kept_bytes, host_bytes, step_ms,
/// micro_ms, samples_per_s}; memory by category;
/// peak_at{phase, stage, stage_name, kept_by_stage, is_floor};
/// measured{peak_bytes, step_ms, step_ms_spread} where it was; alternatives[],
/// plans like it; frontier[] and references[] of {recompute, micro_batch,
/// peak_bytes, step_ms}; measures[]; stages[].
std::string to_json(const PlanResult& result,
                    const std::optional<PlanMeasurement>& measured = {});

}  // namespace reprise
