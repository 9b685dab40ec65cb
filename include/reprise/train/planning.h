#pragma once

#include <reprise/plan/planner.h>
#include <reprise/train/config.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

/// The planner applied to a training: makes the model, measures its costs on
/// its device, decides.
namespace reprise {

struct PlanningOptions {
  bool fresh = false;  ///< measure again, whatever is cached
  /// Runs each stage once: bytes are as exact, times are rough, nothing is tried and
  /// nothing is cached.
  bool quick = false;
  int64_t memory = 0;  ///< bytes that measuring may take; 0: any
  std::function<void(const std::string&)> progress{};  ///< a line at a time
};

/// Answers several requests about one training; what was measured for one serves
/// the next. `config` resolved but for the sizes that are to be chosen.
/// Measurements are kept in ${XDG_CACHE_HOME:-~/.cache}/reprise/profiles. Throws
/// c10::Error where the configuration cannot be run.
class TrainingPlanner {
 public:
  explicit TrainingPlanner(const TrainConfig& config,
                           const PlanningOptions& options = {});
  ~TrainingPlanner();
  TrainingPlanner(TrainingPlanner&&) noexcept;
  TrainingPlanner& operator=(TrainingPlanner&&) noexcept;

  PlanResult plan(const PlanRequest& request);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// One request.
PlanResult plan_training(const TrainConfig& config, const PlanRequest& request,
                         const PlanningOptions& options = {});

/// Trains a few windows by `plan`, within the budget it was made for (0: none), and says
/// what they took.
PlanMeasurement measure_plan(const TrainConfig& config, const Plan& plan,
                             int64_t memory, int windows = 5);

/// What find_largest() makes larger.
enum class LargestAxis { kBatch, kImageSize, kSeq, kDepth };

template <>
struct EnumText<LargestAxis> {
  static constexpr std::array<std::string_view, 4> names{"batch", "image-size",
                                                         "seq", "depth"};
};

struct Largest {
  LargestAxis axis = LargestAxis::kBatch;
  int64_t plain = 0;  ///< that fits with no technique; 0: not even the smallest
  int64_t value = 0;  ///< that fits with them
  int64_t plain_peak_bytes = 0;
  int64_t peak_bytes = 0;
  std::optional<Plan> plan;  ///< of `value`
};

/// The largest value of `axis` that fits in `request.memory`, everything else as configured: without any technique (the
/// whole batch at once, nothing recomputed) and with them. With "batch" that is
/// the samples in memory at once; accumulation makes of it any global batch. Batch,
/// sequence and depth are found to 1, the side of images to the model's own step
/// (the side of a patch; 28 doubled for cnn-basic).
Largest find_largest(const TrainConfig& config, LargestAxis axis,
                     const PlanRequest& request,
                     const PlanningOptions& options = {});

/// For people: "batch 96 fits, 8.0 times the 12 that fit without any technique",
/// the peaks and the plan.
std::string to_text(const Largest& largest);

/// axis, value, plain, factor (null where plain is 0), peak_bytes,
/// plain_peak_bytes and plan (null where nothing fits), as to_json(Plan).
std::string to_json(const Largest& largest);

/// Decides for a session what to run within a budget, again and again as more
/// becomes known.
class BudgetPlanner {
 public:
  virtual ~BudgetPlanner() = default;

  struct Decision {
    int64_t micro_batch = 0;
    int64_t accumulate = 0;
    Schedule schedule;
    int64_t predicted_peak_bytes = 0;
    double predicted_step_ms = 0;
    std::string text{};           ///< in words
    std::string weight_copies{};  ///< that it counts on; empty: as configured
    bool graph = true;  ///< a CUDA graph of the micro-step has room in it
  };

  /// The first one. Throws c10::Error with what would fit where nothing does.
  virtual Decision decide() = 0;

  /// The peak passed the budget by `over_bytes`, or an allocation failed (0).
  /// Keeps the micro-batch where a schedule of it needs less than the present
  /// one, since results then stay the same to the bit; a smaller one otherwise.
  /// Nothing: none is left.
  virtual std::optional<Decision> tighten(const Decision& present,
                                          int64_t over_bytes) = 0;
};

}  // namespace reprise
