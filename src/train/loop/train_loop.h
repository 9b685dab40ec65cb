#pragma once

#include "train/budget/budget_keeper.h"
#include "train/loop/model_evaluator.h"
#include "train/loop/reporter.h"
#include "train/loop/run_clock.h"
#include "train/loop/saver.h"
#include "train/loop/window_profiler.h"
#include "train/step/batch_source.h"
#include "train/step/gradients.h"
#include "train/step/oom_retry.h"
#include "train/step/ranks.h"
#include "train/step/step_runner.h"
#include "train/step/train_setup.h"
#include "train/step/window_exchange.h"

#include <reprise/train/optimizer.h>
#include <reprise/train/trainer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace reprise::detail {

/// Runs a training from its first window to its summary. It owns the components
/// and calls them in order:
///
///     BatchSource      reads batches of this rank and moves them to the device
///     StepRunner       runs forward and backward of a micro-batch
///     Gradients        owns the accumulated gradients
///     WindowExchange   communicates with other ranks within a window
///     Optimizer        updates the parameters
///     BudgetKeeper     plans, and plans again when the budget is exceeded
///     OomRetry         repeats work that ran out of memory
///     WindowProfiler   measures the memory of one window by category
///     ModelEvaluator   evaluates the model on the test data
///     Saver            saves and restores states
///     Reporter         calls the listener and writes metrics
///     RunClock         measures time and speed
///
/// Tested by tests/train/loop/trainer_test.cpp.
class TrainLoop {
 public:
  TrainLoop(TrainSetup setup, TrainerOptions options);
  TrainResult run(const TrainRun& run);

  const Model& model() const { return setup_.model; }
  /// See Trainer::window_ms().
  std::vector<double> window_ms() const { return clock_.window_ms(); }

 private:
  /// Progress of the current window.
  struct Window {
    int64_t samples = 0;  // over all ranks
    int64_t left = 0;     // samples to train, without those before a resume
    torch::Tensor loss;   // sum over all ranks
    // Whether its backward updates the parameters.
    bool updated_in_backward = false;
  };

  TrainResult run_to_end();
  void start();
  void describe_start();
  bool at_end() const;
  bool told_to_stop() const { return run_.stop && run_.stop(); }

  /// Trains one window with its update, and repeats it if allocations fail.
  /// Returns false if it was stopped before the end of the window.
  bool train_window();
  /// Makes one attempt to train a window. Returns false if it was stopped.
  bool attempt_window();
  bool run_micro_batches();
  void begin_window();
  /// The next micro-batch, on the device.
  const Batch& next_batch();
  void train_micro_batch();
  void drop_window();
  /// Restores the state at the beginning of the window.
  void restart_window();
  void seed_window();
  void update();
  /// Runs a part of the update. With several ranks, other ranks may already
  /// have completed theirs, so a part that runs out of memory is repeated on
  /// its own. It must allocate all its memory before it changes anything.
  void guard_update(const std::function<void()>& part);

  /// Makes all ranks agree after a window on whether to stop, save or end.
  void agree_after_window();
  void evaluate_if_due();
  void evaluate();
  void save_if_due();
  void save();
  void show(bool now);
  /// Peak of live device memory so far, including the memory of CUDA graphs.
  int64_t peak_bytes();
  TrainResult finish();
  void export_if_wanted(bool stopped);
  TrainSummary summarize(double trained_s, double speed);

  TrainSetup setup_;
  std::unique_ptr<Ranks> ranks_;
  Reporter reporter_;
  RunClock clock_;
  std::unique_ptr<WindowExchange> exchange_;
  std::unique_ptr<Optimizer> optimizer_;
  StepRunner runner_;
  OomRetry retry_;
  BatchSource source_;
  Gradients gradients_;
  LrScheduleOptions lr_schedule_;
  WindowProfiler profiler_;
  Saver saver_;
  ModelEvaluator evaluator_;
  BudgetKeeper budget_;

  TrainRun run_;
  RunState state_;
  Window window_;
  int64_t total_steps_ = 0;
  int64_t samples_here_ = 0;  // samples trained by this process
  MemoryMeter meter_;
  int64_t graph_peak_bytes_ = 0;                         // of earlier windows
  std::optional<TrainListener::Evaluation> evaluation_;  // the last one
  // Weights with copies inside stay so from update to update; nobody reads them.
  bool keeps_split_ = false;
  bool stop_agreed_ = false;
  bool save_agreed_ = false;
};

}  // namespace reprise::detail
