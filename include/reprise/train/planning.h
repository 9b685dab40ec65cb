#pragma once

#include <reprise/plan/cluster.h>
#include <reprise/plan/planner.h>
#include <reprise/train/config.h>
#include <reprise/train/inputs.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Plans a training: builds its model, measures the costs on its device and
/// chooses sizes and schedule.
namespace reprise {

/// Options for the measurements of a planner.
struct PlanningOptions {
  bool fresh = false;  ///< ignore cached measurements
  /// Runs each stage only once. Bytes are as exact as otherwise, but times are
  /// rough; no schedule is tried and nothing is cached.
  bool quick = false;
  /// Device memory that measurements may use, in bytes; 0: unlimited.
  int64_t memory = 0;
  /// Called with one line of text for each measurement; may be empty.
  std::function<void(const std::string&)> progress{};
};

/// Plans one training for any number of requests, which share their
/// measurements. Measurements are cached in
/// ${XDG_CACHE_HOME:-~/.cache}/reprise/profiles.
class TrainingPlanner {
 public:
  /// `config` must be resolved, except for sizes that the planner chooses.
  /// Throws c10::Error if the configuration cannot be run.
  explicit TrainingPlanner(const TrainConfig& config,
                           const PlanningOptions& options = {});
  /// Overload for a model and data of the caller. The model is moved to the
  /// device of the options.
  TrainingPlanner(TrainInputs inputs, const TrainOptions& training,
                  const PlanningOptions& options = {});
  ~TrainingPlanner();
  TrainingPlanner(TrainingPlanner&&) noexcept;
  TrainingPlanner& operator=(TrainingPlanner&&) noexcept;

  /// Returns the fastest plan for `request`, or why there is none. Measures
  /// what earlier requests have not measured yet.
  PlanResult plan(const PlanRequest& request);

  /// Plans for several devices like this one; see plan/cluster.h.
  ClusterPlan plan(const ClusterRequest& request);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Plans a training for a single request; see TrainingPlanner.
PlanResult plan_training(const TrainConfig& config, const PlanRequest& request,
                         const PlanningOptions& options = {});

/// Trains `windows` windows according to `plan` and returns their peak memory
/// and speed. `memory` is the budget of the plan in bytes; 0: none. Throws
/// c10::Error if the configuration cannot be run.
PlanMeasurement measure_plan(const TrainConfig& config, const Plan& plan,
                             int64_t memory, int windows = 5);

/// Size that find_largest() maximizes.
enum class LargestAxis { kBatch, kImageSize, kSeq, kDepth };

template <>
struct EnumText<LargestAxis> {
  static constexpr std::array<std::string_view, 4> names{"batch", "image-size",
                                                         "seq", "depth"};
};

/// Result of find_largest().
struct Largest {
  LargestAxis axis = LargestAxis::kBatch;
  /// Largest value that fits without any technique; 0: none fits.
  int64_t plain = 0;
  /// Largest value that fits with all techniques; 0: none fits.
  int64_t value = 0;
  int64_t plain_peak_bytes = 0;  ///< predicted peak at `plain`
  int64_t peak_bytes = 0;        ///< predicted peak at `value`
  std::optional<Plan> plan;      ///< plan for `value`; empty: none fits
};

/// Returns the largest value of `axis` that fits in `request.memory` bytes if
/// everything else stays as configured: without any technique (the whole batch
/// at once, no recomputation), and with all of them. For kBatch the value is
/// the micro-batch, since accumulation allows any global batch. Batch, sequence
/// length and depth are exact; image sizes are multiples of what the model
/// accepts (the patch size, or 28 times a power of two for cnn-basic). Throws
/// c10::Error if `request.memory` is 0 or the configuration cannot be run.
Largest find_largest(const TrainConfig& config, LargestAxis axis,
                     const PlanRequest& request,
                     const PlanningOptions& options = {});

/// Returns human-readable text: "batch 96 fits, 8.0 times the 12 that fit
/// without any technique", the peaks and the plan.
std::string to_text(const Largest& largest);

/// Returns a JSON object with the keys axis, value, plain, factor (null if
/// plain is 0), peak_bytes, plain_peak_bytes and plan (as in to_json(Plan);
/// null if nothing fits).
std::string to_json(const Largest& largest);

/// Chooses the plan of a training within its memory budget: once before the
/// first window, and again whenever a plan turns out not to fit.
class BudgetPlanner {
 public:
  virtual ~BudgetPlanner() = default;

  /// Returns the first plan. Throws c10::Error with the smallest budget that
  /// works if nothing fits.
  virtual Plan decide() = 0;

  /// Returns a plan that needs less memory than `present`, after the peak
  /// exceeded the budget by `over_bytes` or an allocation failed (0). If a
  /// schedule with the same micro-batch needs less memory it is chosen, since
  /// the results then stay bit-identical; otherwise the micro-batch becomes
  /// smaller. Returns nullopt if no smaller plan is left.
  virtual std::optional<Plan> tighten(const Plan& present,
                                      int64_t over_bytes) = 0;
};

/// Predicted memory and time of a training. Less accurate than a plan's.
struct TrainingPrediction {
  int64_t peak_bytes = 0;  ///< on the device
  double step_ms = 0;      ///< milliseconds per window
};

/// Predicts many trainings from few measurements: runs each stage of a model
/// once at two micro-batch sizes, and interpolates linearly for all trainings
/// of that model. `configs` must be resolved. The result has one entry per
/// configuration. It is nullopt if the training cannot be built, leaves its
/// micro-batch to a planner, or does not fit on the device even at the smallest
/// size.
std::vector<std::optional<TrainingPrediction>> predict_trainings(
    const std::vector<TrainConfig>& configs,
    const PlanningOptions& options = {});

}  // namespace reprise
