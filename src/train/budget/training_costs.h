#pragma once

#include "compat/cuda_graph.h"
#include "train/budget/schedule_timer.h"
#include "train/step/train_setup.h"

#include <reprise/plan/planner.h>
#include <reprise/recompute/stage_costs.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace reprise::detail {

/// Measures the costs of a training, and keeps them on disk for the next time.
class TrainingCosts final : public CostSource {
 public:
  struct Options {
    bool fresh = false;        // measure again, whatever was kept
    int64_t memory = 0;        // bytes that trying a schedule may take; 0: any
    bool memory_only = false;  // one run of each stage; nothing is kept on disk
    std::function<void(const std::string&)> progress{};
  };

  /// Uses the model as it stands; parameters, gradients, buffers and random generators are
  /// unchanged afterwards.
  TrainingCosts(TrainSetup setup, Options options);

  const CostProfile& profile(const std::string& precision) override;
  bool measure(const std::string& precision, int64_t micro_batch) override;
  std::optional<double> try_plan(const Plan& plan) override;
  bool compare(const std::vector<Plan>& plans) override;

  /// Lets go of what libraries took to be measured with.
  void release_workspaces();

 private:
  CostProfile& entry(const std::string& precision);
  /// CostProfile::graph of a training here.
  GraphMode graph() const;
  /// On the stream that the training would use: libraries keep a workspace for each.
  compat::GraphStreamScope trained_stream() const;
  std::string key_of(const std::string& precision) const;
  std::vector<std::string> stage_names() const;
  std::unique_ptr<WeightCopies> copies(const std::string& precision) const;
  void measure_fixed(CostProfile& profile);
  void measure_update(CostProfile& profile);
  void measure_workspace(CostProfile& profile, const SizeCosts& size);
  /// Sums and figures of a training that stay on the device.
  int64_t held_by_training() const;
  SizeCosts measure_size(const std::string& precision, int64_t micro_batch);
  StageCostOptions tracing() const;
  SizeCosts trace_size(const std::string& precision, int64_t micro_batch,
                       const StageCostOptions& tracing);
  void measure_factors(CostProfile& profile, SizeCosts& size);
  /// Into what trying may take; `first` as micro_batch_peak() has it.
  bool fits(const CostProfile& profile, const SizeCosts& size,
            const Schedule& schedule, bool first) const;
  bool fits_graph(const CostProfile& profile, const SizeCosts& size,
                  const Schedule& schedule) const;
  /// Milliseconds of a micro-batch in the midst of others. Nothing if there is no
  /// room for it.
  std::optional<double> run_schedule(const CostProfile& profile,
                                     const SizeCosts& size,
                                     const Schedule& schedule, bool graph,
                                     const ScheduleTimer::Timing& timing);
  Batch make_batch(int64_t samples) const;
  int64_t bytes_of(const Batch& batch) const;  // on the device
  /// Whether worker threads enlarge images, in the memory that is counted.
  bool workers_prepare() const;
  /// Of the batches that workers have read ahead.
  int64_t ahead_bytes(const Batch& raw, const Batch& prepared) const;
  void say(const std::string& text) const;
  std::string path_of(const CostProfile& profile) const;
  void load_kept(CostProfile& profile) const;
  void keep(const CostProfile& profile) const;

  TrainSetup setup_;
  Options options_;
  std::map<std::string, CostProfile> profiles_;
};

}  // namespace reprise::detail
