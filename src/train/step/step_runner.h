#pragma once

#include "train/profile/window_profile.h"
#include "train/step/micro_step.h"
#include "train/step/step_graphs.h"
#include "train/step/train_setup.h"
#include "train/step/window_exchange.h"

#include <reprise/memory/kept.h>
#include <reprise/recompute/execution.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace reprise::detail {

/// Runs the micro-batches of a training: by a CUDA graph if there is one, otherwise by an
/// execution of the schedule. Training, profiling, schedule trials and ranks without
/// samples all run their micro-batches through it.
class StepRunner {
 public:
  struct Options {
    GraphMode graph = GraphMode::kAuto;
    std::function<void(const std::string&)> warn{};
  };

  /// Keeps references to `setup`, whose options may change between windows, and to
  /// `exchange`.
  StepRunner(const TrainSetup& setup, WindowExchange& exchange,
             Schedule schedule, Options options);

  const Schedule& schedule() const { return schedule_; }
  /// Replaces the schedule; CUDA graphs are dropped.
  void set_schedule(Schedule schedule);

  /// Makes the half-precision copies of the weights, or brings them up to date.
  void refresh_weight_copies();
  /// The weights are about to change: copies are outdated from now on.
  void expire_weight_copies();
  /// Frees the copies and the CUDA graphs that use them.
  void drop_weight_copies();
  std::vector<torch::Tensor> weight_copies() const;

  /// From now on, runs without CUDA graphs and reports every operation to `observer` and
  /// what is saved to `kept`. Both must outlive unobserve().
  void observe(ExecutionObserver& observer, const KeptMeter* kept,
               bool separate_graphs);
  void unobserve() { observed_.reset(); }

  struct Run {
    double weight = 1;  ///< gradient of the loss sum
    bool last = true;   ///< of this rank in the window
    bool allow_graph =
        true;  ///< off: note the shape, but run without a CUDA graph
    WindowProfile* profile = nullptr;
  };
  /// Forward, backward and sums of one micro-batch, prepared and on the device.
  void run(const Batch& batch, const Run& how);

  /// Takes part in the statistics of other ranks' micro-batch with a sample that counts
  /// for nothing.
  void run_empty(const Batch& batch);

  /// Outputs of the chain, for evaluation.
  Tensors forward(const Batch& batch);

  /// Sum of the losses since clear_loss().
  MicroStep& micro_step() { return micro_step_; }
  const torch::Tensor& loss() const { return micro_step_.loss(); }

  StepGraphs& graphs() { return graphs_; }
  const StepGraphs& graphs() const { return graphs_; }

 private:
  Execution make_execution() const;

  const TrainSetup& setup_;
  WindowExchange& exchange_;
  Schedule schedule_;
  MicroStep micro_step_;
  StepGraphs graphs_;
  Execution execution_;
  std::optional<Execution> observed_;
  std::unique_ptr<WeightCopies> copies_;  // null: not wanted, or not made yet
};

}  // namespace reprise::detail
