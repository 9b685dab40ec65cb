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

/// A training from its first window to its summary. It owns the parts and calls them in
/// order; each part does one job:
///
///     BatchSource      batches of this rank, on the device
///     StepRunner       forward and backward of a micro-batch
///     Gradients        what has been accumulated, and when it is cleared
///     WindowExchange   what ranks exchange within a window
///     Optimizer        the update
///     BudgetKeeper     plans, and plans again when the budget is passed
///     OomRetry         repeats what ran out of memory
///     WindowProfiler   where the memory of one window goes
///     ModelEvaluator, Saver, Reporter, RunClock
class TrainLoop {
 public:
  TrainLoop(TrainSetup setup, TrainerOptions options);
  TrainResult run(const TrainRun& run);

  const Model& model() const { return setup_.model; }
  /// Duration of each window of a short run; waits for the device.
  std::vector<double> window_ms() const { return clock_.window_ms(); }

 private:
  /// Progress of the window that is open.
  struct Window {
    int64_t samples = 0;  // of all ranks
    int64_t left = 0;     // samples of it that this group of ranks trains
    torch::Tensor loss;   // sum over all ranks
  };

  TrainResult run_to_end();
  void start();
  void describe_start();
  bool at_end() const;
  bool told_to_stop() const { return run_.stop && run_.stop(); }

  /// Trains one window and updates; repeats it while allocations fail. False if it was
  /// told to stop before the window's end.
  bool train_window();
  /// One attempt. False if it was told to stop.
  bool attempt_window();
  bool run_micro_batches();
  void begin_window();
  void train_micro_batch();
  void drop_window();
  /// Back to the state at the beginning of the window.
  void restart_window();
  void seed_window();
  void update();
  /// Runs a part of the update. With several ranks the others may have made theirs
  /// already, so that a part that runs out of memory is repeated by itself. It must
  /// change nothing until it has its memory.
  void guard_update(const std::function<void()>& part);

  /// What all ranks decide together after a window: stop, save, end.
  void agree_after_window();
  void evaluate_if_due();
  void evaluate();
  void save_if_due();
  void save() { saver_.save(state_, window_.samples); }
  void show(bool now);
  /// Most memory live on the device so far, with that of CUDA graphs.
  int64_t peak_bytes();
  TrainResult finish();
  TrainSummary summarize(double trained_s, double speed);

  TrainSetup setup_;
  std::unique_ptr<Ranks> ranks_;
  Reporter reporter_;
  RunClock clock_;
  std::unique_ptr<WindowExchange> exchange_;
  StepRunner runner_;
  OomRetry retry_;
  BatchSource source_;
  Gradients gradients_;
  std::unique_ptr<Optimizer> optimizer_;
  LrScheduleOptions lr_schedule_;
  WindowProfiler profiler_;
  Saver saver_;
  ModelEvaluator evaluator_;
  BudgetKeeper budget_;

  TrainRun run_;
  RunState state_;
  Window window_;
  int64_t total_steps_ = 0;
  int64_t samples_here_ = 0;  // trained by this process
  MemoryMeter meter_;
  int64_t graph_peak_bytes_ = 0;                         // of earlier windows
  std::optional<TrainListener::Evaluation> evaluation_;  // the last one
  bool stop_agreed_ = false;
  bool save_agreed_ = false;
};

}  // namespace reprise::detail
