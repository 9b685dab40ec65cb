#pragma once

#include "compat/autocast.h"
#include "compat/rng.h"
#include "compat/timestamp.h"
#include "distributed/sync_batch_norm.h"
#include "train/budget/training_costs.h"
#include "train/loop/components.h"
#include "train/loop/metrics.h"
#include "train/loop/oom_retry.h"
#include "train/loop/time_audit.h"
#include "train/loop/window_snapshot.h"
#include "train/profile/window_profile.h"
#include "train/step/micro_step.h"
#include "train/step/step_graphs.h"
#include "train/store/tensorboard.h"

#include <reprise/accumulate/accumulator.h>
#include <reprise/data/loader.h>
#include <reprise/data/prepare.h>
#include <reprise/distributed/reducer.h>
#include <reprise/models/model.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>
#include <reprise/train/optimizer.h>
#include <reprise/train/planning.h>
#include <reprise/train/scaler.h>
#include <reprise/train/trainer.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

/// One training from its start to its summary: the parts and the order in which
/// they work together.
namespace reprise::detail {

using Clock = std::chrono::steady_clock;

/// Left out of the speed: they make caches, gradients and optimizer state, and
/// the second is looked into.
constexpr int64_t kWarmUpWindows = 2;

/// Between saved states, where no number of updates is given.
constexpr double kSaveEveryS = 600;

class Session {
 public:
  /// `planner` null: made where the configuration asks for one.
  explicit Session(const TrainConfig& config,
                   std::unique_ptr<BudgetPlanner> planner = nullptr,
                   const PlanningOptions& planning = {},
                   std::shared_ptr<RankGroup> group = nullptr);
  TrainResult run(const TrainRun& run);

  /// For measuring what it costs, before it runs.
  CostParts cost_parts() const;
  /// How long each window of a short run took; waits for the device.
  std::vector<double> window_ms() const;

 private:
  TrainResult run_all();
  void start();
  void open_loader();
  /// Leaves the resident dataset out of the memory that is counted.
  void leave_out_dataset();
  /// Trains one window and updates; starts it again as long as allocations fail.
  /// False where it was told to stop before the window's end.
  bool train_window();
  bool try_window();
  /// The same with all ranks: starts it again where it failed on one of them.
  void train_window_together();
  void begin_window();
  /// Copies of the weights as they are now, where they are wanted.
  void copy_weights();
  /// Makes room for others' copies, and lets go of the graphs that use them.
  void drop_copies();
  /// Lets go of what an unfinished window holds.
  void drop_window();
  /// Back to where the window began.
  void restart_window();

  void plan(std::unique_ptr<BudgetPlanner> planner,
            const PlanningOptions& planning);
  PlanRequest request() const;
  Execution make_execution() const;
  /// Whether the schedule comes from a planner, here or on rank 0.
  bool planned() const { return decision_.has_value(); }
  /// With what reducing gradients takes.
  int64_t predicted_peak_bytes() const;
  /// Runs `body`, which may run the model, and puts back what that changed. Only
  /// between windows.
  void measuring(const std::function<void()>& body);
  void adopt(BudgetPlanner::Decision decision);
  /// Holds graphs to the budget, where they were not asked for.
  void fit_graphs();
  /// Writes the micro-batch decided to the run directory.
  void keep_config();
  /// False where the plan stays as it is.
  bool tighten(int64_t over_bytes);
  void tighten_after_failure();
  /// After a window: plans again where its peak passed the budget.
  void keep_within_budget();

  // Ranks.
  bool first_rank() const { return !group_ || group_->rank() == 0; }
  void join_ranks();
  void make_reducer();
  /// Of all its norms the most channels; 0: nothing is to be synchronised.
  int64_t shared_channels() const;
  /// Micro-batches of the rank that has most of them in this window.
  int64_t steps_of(const Loader::Window& window) const;
  /// Takes part in the norms of others' micro-batch with nothing of its own.
  void run_empty_micro_batch();
  /// Rank 0's decision, on all ranks; nothing where it has none.
  std::optional<BudgetPlanner::Decision> shared(
      std::optional<BudgetPlanner::Decision> own) const;
  /// What all do after a window: stop, save, end, plan again.
  void agree_after_window();
  void start_random_numbers();
  /// Clips and scales what is updated; the norm, where there is a limit.
  bool ready_gradients(torch::Tensor& norm);
  void step_optimizer(double rate);
  /// Runs a piece of the update. Other ranks may have made theirs already, so that
  /// one that runs out of memory is repeated by itself, not with its window. Until
  /// the piece has its memory it must change nothing.
  void within_update(const std::function<void()>& piece);
  NamedTensors optimizer_state();
  void load_optimizer(NamedTensors state);

  bool evaluates() const;
  void evaluate_if_due();
  void save_if_due();
  TrainResult finish();
  void load(const RunDirectory::Saved& saved);
  /// The newest state on disk, if there is one.
  std::optional<RunDirectory::Saved> newest();
  NamedTensors tensors_to_save();
  bool save();
  void train_micro_batch(Execution& execution, WindowProfile* profile);
  /// Most live on the device so far, with the memory of graphs.
  int64_t peak_bytes();
  bool update(WindowProfile* profile);
  void evaluate();
  struct Tested {
    double loss = 0, right = 0, count = 0;
    bool whole = true;
  };
  Tested evaluate_once(int64_t batch);
  bool told_to_stop() const;
  /// After a window: all are done, or the time given is over.
  bool at_end() const { return time_is_up_ || state_.step >= total_steps_; }
  void look_at_clock();
  void tell_training(bool active);
  void show(bool now);
  void note_speed();
  double samples_per_s() const;
  void warn(const std::string& text);
  void wait_for_device() const;
  double seconds() const;

  std::shared_ptr<RankGroup> group_;  // null: this process alone
  TrainConfig config_;                // its sizes follow the plan
  RunState state_;
  TrainRun run_;
  torch::Device device_;
  std::shared_ptr<HostStore> host_;  // null: nothing is kept there
  Model model_;
  NamedTensors parameters_;
  std::vector<torch::Tensor> parameter_list_;
  compat::AutocastState autocast_;
  MicroStep step_;
  std::shared_ptr<const Dataset> train_data_;
  std::shared_ptr<const Dataset> test_data_;  // null: no evaluation
  int64_t dataset_bytes_ = 0;  // resident in host memory, never counted
  PrepareOptions prepare_;
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<Optimizer> optimizer_;
  GradScaler scaler_;
  Accumulator accumulator_;
  std::unique_ptr<WeightCopies> copies_;  // null: not wanted, or not there yet
  LrScheduleOptions rate_;
  std::unique_ptr<GradientReducer> reducer_;  // with group_
  bool reducing_ = false;                     // in this backward
  std::shared_ptr<SyncBatchNormGroup>
      norms_;               // null: each rank's own statistics
  int64_t steps_left_ = 0;  // of the rank that has most of the window
  Schedule schedule_;
  Execution execution_;
  KeptMeter kept_;
  Batch batch_;  // the one in work, for the ledger
  MemoryLedger ledger_;
  std::optional<WindowProfile> profile_;
  std::optional<Metrics> metrics_;
  MemoryMeter meter_;
  StepGraphs graphs_;
  int64_t graph_peak_bytes_ = 0;  // of earlier windows
  OomRetry oom_retry_;
  WindowSnapshot window_snapshot_;
  bool profiling_ = false;  // into this window, with profile_

  std::unique_ptr<BudgetPlanner> planner_;  // null: the schedule is given
  std::optional<BudgetPlanner::Decision> decision_;
  MemoryMeter window_meter_;
  int64_t replans_ = 0;
  bool over_for_good_ = false;  // the budget is passed by the smallest plan

  int64_t total_steps_ = 0;
  bool time_is_up_ = false;
  // Training proper, as a listener is told of it.
  bool running_ = false;
  Clock::time_point look_again_;                // at the clock
  std::vector<compat::Timestamp> window_ends_;  // of a short run
  int64_t windows_ = 0;                         // of this process
  int64_t window_samples_ = 0;                  // of all ranks
  int64_t window_rest_ = 0;    // of these, trained by this group
  torch::Tensor window_loss_;  // sum over all ranks
  // As all ranks have agreed after a window.
  bool stop_agreed_ = false;
  bool save_agreed_ = false;
  bool saves_ = false;  // rank 0 has a directory
  Clock::time_point began_;
  double aside_s_ = 0;   // evaluation and saving, not training
  double before_s_ = 0;  // trained before a resume
  double waited_s_ = 0;  // for data, of loaders that are gone
  Clock::time_point last_save_;
  Clock::time_point last_show_;
  TimeAudit audit_;
  double denormal_share_ = 0;  // of the gradients of the window looked into
  int64_t samples_here_ = 0;   // trained on by this process
  int64_t steady_from_samples_ = 0;  // of these, before the speed counts
  double steady_from_s_ = 0;
  int64_t steady_from_windows_ = 0;  // 0: not yet
  int64_t captures_seen_ = 0;        // of CUDA graphs
  int64_t evaluated_at_ = -1;
  std::optional<TrainListener::Evaluation> evaluation_;
  bool save_failed_ = false;
  bool stopped_ = false;
};

}  // namespace reprise::detail
