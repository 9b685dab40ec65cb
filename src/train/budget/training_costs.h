#pragma once

#include "compat/cuda_graph.h"
#include "train/budget/schedule_timer.h"
#include "train/step/train_setup.h"

#include <reprise/plan/planner.h>
#include <reprise/recompute/stage_costs.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace reprise::detail {

/// Bytes per millisecond.
struct LinkSpeed {
  double to_device = 0, to_host = 0;
};

/// Measures the costs of a training and caches them on disk. Tested by
/// tests/train/budget/planning_test.cpp.
class TrainingCosts final : public CostSource {
 public:
  struct Options {
    bool fresh = false;        ///< ignore cached measurements
    int64_t memory = 0;        ///< bytes a trial may use; 0: unlimited
    bool memory_only = false;  ///< run each stage once; cache nothing
    std::function<void(const std::string&)> progress{};
    /// Costs of a training that differs in its updates only: measurements of its
    /// micro-batches are reused. Not owned; may be null.
    const TrainingCosts* same_steps = nullptr;
    /// A training holds its state, beside which a second one may not fit.
    bool training = false;
    /// Costs with the same optimizer, whose update is taken for that of this training if the
    /// update cannot be measured. Not owned; may be null.
    const TrainingCosts* same_update = nullptr;
  };

  /// Measures with the model of `setup`. Parameters, gradients, buffers and
  /// random generators are restored after each measurement.
  TrainingCosts(TrainSetup setup, Options options);

  const CostProfile& profile(Precision precision) override;
  bool measure(Precision precision, int64_t micro_batch) override;
  std::optional<double> try_plan(const Plan& plan) override;
  bool compare(const std::vector<Plan>& plans) override;

  const TrainOptions& options() const { return setup_.options; }

  /// Memory of the training's state in these measurements.
  StatePlace state() const {
    return setup_.options.state == StatePlace::kAuto ? StatePlace::kDevice
                                                     : setup_.options.state;
  }

  /// Share of the optimizer's state in host memory; see Plan.
  double host_share() const { return setup_.options.host_share; }

  /// Measures copies between host and device; zeros if the host gives no memory.
  LinkSpeed link() const;

  /// From now on a training holds its state: nothing is measured that needs a second one.
  void begin_training() { options_.training = true; }

  /// Number of micro-batch sizes that were measured.
  size_t measurements() const;

  /// Frees library workspaces that were allocated by measurements.
  void release_workspaces();
  /// Frees the optimizer's state in host memory that measurements share.
  void release_optimizer() { trial_optimizer_.reset(); }

 private:
  CostProfile& entry(Precision precision);
  /// Value of CostProfile::graph for this training.
  GraphMode graph() const;
  /// Value of CostProfile::update for this training.
  UpdateMode update(const CostProfile& profile) const;
  /// Selects the stream that the training would use, because libraries allocate
  /// one workspace per stream.
  compat::GraphStreamScope trained_stream() const;
  std::string key_of(Precision precision) const;
  std::vector<std::string> stage_names() const;
  std::unique_ptr<WeightCopies> copies(Precision precision) const;
  bool moves_parameters() const { return state() == StatePlace::kHostAll; }
  /// Moves the parameters to where the measurements need them. Throws c10::OutOfMemoryError if
  /// there is no room.
  void place_parameters() const;
  void measure_fixed(CostProfile& profile);
  /// Takes the parameters in host memory out of the fixed memory.
  void separate_moved(CostProfile& profile) const;
  /// Copies the measurements of Options::same_steps.
  void reuse_steps(CostProfile& profile) const;
  /// Copies that of one size, if it was measured since; false if it was not.
  bool reuse_step(CostProfile& profile, int64_t micro_batch) const;
  void measure_update(CostProfile& profile);
  /// Copies the measurements of Options::same_update. Throws c10::OutOfMemoryError if there are
  /// none.
  void reuse_update(CostProfile& profile) const;
  void measure_whole_update(CostProfile& profile, Optimizer& optimizer);
  int64_t bytes_held_by(const Optimizer& optimizer) const;  // on the device
  /// Measures the temporaries of updates in the backward.
  void measure_stage_updates(CostProfile& profile, Optimizer& optimizer);
  /// Measures how much longer the last micro-batch of a window takes, which updates the
  /// parameters, than others, which were `tried`, and completes the trial with its memory.
  void measure_last_update(CostProfile& profile, const Plan& plan,
                           TriedSchedule& tried);
  void measure_workspace(CostProfile& profile, const SizeCosts& size);
  /// Bytes of loss sums and metrics that a training holds on the device.
  int64_t held_by_training() const;
  SizeCosts measure_size(Precision precision, int64_t micro_batch);
  StageCostOptions tracing(const WeightCopies* copies) const;
  /// Measures the stages for one micro-batch size. If `warm_up` is true, times
  /// are rough; such a run allocates the workspaces of libraries.
  SizeCosts trace_size(Precision precision, int64_t micro_batch,
                       bool warm_up = false);
  void measure_factors(CostProfile& profile, SizeCosts& size);
  /// How a schedule is run.
  struct Mode {
    bool graph = false;
    UpdateMode update = UpdateMode::kAfter;
    // Several micro-batches, of which the last one updates.
    bool window = false;
    // That the peak is known to be below its prediction.
    int64_t less_bytes = 0;
  };
  static Mode mode_of(const Plan& plan, UpdateMode update) {
    return {plan.graph, update, false, std::max<int64_t>(0, -plan.extra_bytes)};
  }
  /// Whether a trial fits in `options_.memory`; for `first` see
  /// micro_batch_peak().
  bool fits(const CostProfile& profile, const SizeCosts& size,
            const Schedule& schedule, bool first, const Mode& mode) const;
  bool fits_graph(const CostProfile& profile, const SizeCosts& size,
                  const Schedule& schedule, const Mode& mode) const;
  bool fits_updating(const CostProfile& profile, const SizeCosts& size,
                     const Schedule& schedule, const Mode& mode) const;
  bool is_allowed(int64_t peak_bytes, const Mode& mode) const {
    return options_.memory == 0 ||
           peak_bytes - mode.less_bytes <= options_.memory;
  }
  struct Trial {
    double ms = 0;            // per micro-batch in a row of micro-batches
    int64_t extra_bytes = 0;  // see TriedSchedule
  };
  /// Returns nullopt if it does not fit in memory.
  std::optional<Trial> run_schedule(const CostProfile& profile,
                                    const SizeCosts& size,
                                    const Schedule& schedule, Mode mode,
                                    const ScheduleTimer::Timing& timing);
  /// The optimizer of a measurement. One with state in host memory is kept until
  /// release_optimizer(), because allocating pinned memory takes seconds.
  std::shared_ptr<Optimizer> trial_optimizer(Precision precision);
  Batch make_batch(int64_t samples) const;
  int64_t bytes_of(const Batch& batch) const;  // on the device
  /// Whether worker threads prepare batches in memory that is counted.
  bool workers_prepare() const;
  /// Bytes of the batches that workers have read ahead.
  int64_t ahead_bytes(const Batch& raw, const Batch& prepared) const;
  void say(const std::string& text) const;
  std::string path_of(const CostProfile& profile) const;
  void load_kept(CostProfile& profile) const;
  void keep(const CostProfile& profile) const;

  TrainSetup setup_;
  Options options_;
  std::map<Precision, CostProfile> profiles_;
  std::shared_ptr<Optimizer> trial_optimizer_;
  Precision trial_precision_ = Precision::kFp32;
};

}  // namespace reprise::detail
