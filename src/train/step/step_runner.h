#pragma once

#include "accumulate/half_gradients.h"
#include "train/profile/window_profile.h"
#include "train/step/backward_update.h"
#include "train/step/micro_step.h"
#include "train/step/step_graphs.h"
#include "train/step/train_setup.h"
#include "train/step/window_exchange.h"
#include "train/step/window_snapshot.h"

#include <reprise/memory/kept.h>
#include <reprise/recompute/execution.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace reprise::detail {

/// Runs the micro-batches of a training: with a CUDA graph if there is one,
/// otherwise with an Execution of the schedule. Training, profiling, schedule
/// trials and ranks without samples all run their micro-batches through it.
/// Tested by tests/train/loop/trainer_test.cpp and tests/train/step/graph_test.cpp.
class StepRunner {
 public:
  struct Options {
    GraphMode graph = GraphMode::kAuto;
    std::function<void(const std::string&)> warn{};
    /// For UpdateMode::kBackward; not owned; may be null.
    Optimizer* optimizer = nullptr;
    UpdateMode update = UpdateMode::kAfter;  ///< not kAuto
  };

  /// Keeps references to `setup` and `exchange`. The options of `setup` may
  /// change between windows.
  StepRunner(const TrainSetup& setup, WindowExchange& exchange,
             Schedule schedule, Options options);

  const Schedule& schedule() const { return schedule_; }
  /// The stages that its operations visit.
  const std::vector<StageVisit>& visits() const { return visits_; }
  /// Replaces the schedule and drops all CUDA graphs.
  void set_schedule(Schedule schedule);

  /// Sets when parameters are updated, by run() itself or by the caller after it, and drops
  /// all CUDA graphs if that changes. Throws c10::Error if the optimizer cannot do so.
  void set_update(UpdateMode update);
  bool updates_in_backward() const { return update_ != nullptr; }
  /// Moves the optimizer's state and the parameters; kAuto stands for kDevice. If there is no
  /// room, warns, leaves them where they are and returns false. Drops all CUDA graphs if
  /// something is moved. kHostAll needs UpdateMode::kBackward. `accumulate`: whether windows
  /// have several micro-batches.
  bool set_state(StatePlace place, bool accumulate);
  /// Whether the parameters are in host memory.
  bool moves_parameters() const;
  /// Bytes of the optimizer's state in host memory.
  int64_t host_state_bytes() const;
  /// Whether run() has updated parameters of a window whose update is not finished. The
  /// micro-batch cannot be repeated then.
  bool half_updated() const { return update_ && update_->changed(); }
  /// Whether a backward has been continued after a failed allocation since the last call.
  bool take_continued() { return std::exchange(continued_, false); }
  /// Ends the update of a window; with UpdateMode::kBackward.
  void finish_update();
  /// See BackwardUpdate.
  const BackwardUpdate* backward_update() const { return update_.get(); }
  /// Sums of gradients with GradientSums::kBf16; otherwise null.
  HalfGradients* half_gradients() { return half_gradients_.get(); }

  /// Creates or updates the half-precision copies of the weights.
  void refresh_weight_copies();
  /// Marks the copies as outdated because the weights are about to change. `keep_split`:
  /// weights with copies inside stay as they are, for an optimizer that knows them.
  void expire_weight_copies(bool keep_split = false);
  /// Makes the values of all weights readable.
  void restore_weights();
  /// Frees the copies and the CUDA graphs that use them.
  void drop_weight_copies();
  std::vector<torch::Tensor> weight_copies() const;

  /// Reports every operation to `observer` and every saved tensor to `kept`
  /// until unobserve(), and runs without CUDA graphs. Both must stay valid
  /// until then.
  void observe(ExecutionObserver& observer, const KeptMeter* kept,
               bool separate_graphs);
  void unobserve() { observed_.reset(); }

  struct Run {
    double weight = 1;  ///< gradient of the loss sum
    bool last = true;   ///< last micro-batch of this rank in the window
    /// If false, notes the shape but runs without a CUDA graph.
    bool allow_graph = true;
    WindowProfile* profile = nullptr;
    uint64_t seed = 0;  ///< of the rounding with GradientSums::kBf16
    /// With UpdateMode::kBackward: the learning rate of the update that the backward makes.
    /// Without one it makes none and adds to the gradients, without a CUDA graph.
    std::optional<double> update_lr{};
  };
  /// Runs forward and backward of one micro-batch, which must be prepared and
  /// on the device, and adds to the sums of losses and gradients.
  void run(const Batch& batch, const Run& how);

  /// Takes part in the collectives of other ranks' micro-batch. `batch` does
  /// not contribute to statistics, losses or gradients.
  void run_empty(const Batch& batch);

  /// Runs the forward only and returns the outputs of the chain.
  Tensors forward(const Batch& batch);

  MicroStep& micro_step() { return micro_step_; }
  /// Sum of the losses since MicroStep::clear_loss().
  const torch::Tensor& loss() const { return micro_step_.loss(); }

  StepGraphs& graphs() { return graphs_; }
  const StepGraphs& graphs() const { return graphs_; }

 private:
  Execution make_execution() const;
  /// Why the step cannot be captured; empty if it can.
  std::string capture_refusal() const;
  void attach(ExecutionOptions& options, bool cuts) const;
  void warn_of_place(const char* what, bool host, const std::string& why) const;
  /// Both return false if there is no room.
  bool move_parameters(bool host);
  bool move_optimizer_state(bool host);
  void run_recorded(const Tensors& batch);
  /// Runs a micro-batch without a CUDA graph.
  void run_operations(Execution& execution, const Tensors& inputs,
                      MicroStep::Run how, compat::WorkLane* lane);
  /// Completes a backward that has updated parameters and in which an allocation failed: the
  /// stages before run again and keep as little as possible. Returns false if nothing was
  /// updated, so that the window can be repeated, or if this is not possible either.
  bool continue_backward(Execution& execution, const Tensors& inputs,
                         compat::WorkLane* lane, std::string failure);
  /// Decides which gradients operators add and which are accumulated together;
  /// see Gradients. Called when weight copies are created or freed.
  void assign_gradients();

  const TrainSetup& setup_;
  WindowExchange& exchange_;
  Schedule schedule_;
  std::vector<StageVisit> visits_;  // of the schedule
  Optimizer* optimizer_;
  std::function<void(const std::string&)> warn_;
  std::unique_ptr<BackwardUpdate> update_;         // null: the caller updates
  std::unique_ptr<HalfGradients> half_gradients_;  // null: exact ones
  MicroStep micro_step_;
  StepGraphs graphs_;
  Execution execution_;
  std::optional<Execution> observed_;
  std::unique_ptr<WeightCopies> copies_;  // null: disabled or not created yet
  int64_t most_held_bytes_ = 0;  // of an output's gradient, to continue
  WindowSnapshot start_;         // of a micro-batch that updates
  bool continued_ = false;
};

}  // namespace reprise::detail
