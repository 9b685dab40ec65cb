#pragma once

#include <reprise/distributed/group.h>
#include <reprise/train/config.h>
#include <reprise/train/inputs.h>
#include <reprise/train/planning.h>
#include <reprise/train/run_directory.h>
#include <reprise/train/summary.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace reprise {
namespace detail {
class TrainLoop;
}

/// What happened, told to whoever shows it. Called on the training thread.
class TrainListener {
 public:
  virtual ~TrainListener() = default;

  struct Start {
    std::string model;  ///< with its size
    std::string data;
    std::string how;  ///< batch, accumulation, recomputation, precision, device
    int64_t step = 0;
    int64_t total_steps = 0;
  };
  virtual void started(const Start&) {}

  struct Step {
    int64_t step = 0;         ///< updates done
    int64_t total_steps = 0;  ///< 0: as many as the time allows
    double loss = 0;          ///< mean over the last update's window
    double rate = 0;
    double samples_per_s = 0;
    int64_t live_bytes = 0, peak_bytes = 0, limit_bytes = 0;
    double left_s = 0;  ///< at this speed
  };
  /// Not for every update: a few times a second at most.
  virtual void stepped(const Step&) {}

  /// Training proper begins or goes on (true), or stops: for an evaluation, for
  /// saving, at the end. It begins after the two updates that warm up, at once
  /// where no more than two are made; a training that is stopped before never
  /// begins.
  virtual void training(bool /*active*/) {}

  struct Evaluation {
    int64_t step = 0;
    double loss = 0;
    double accuracy = 0;
  };
  virtual void evaluated(const Evaluation&) {}
  virtual void saved(const std::string& /*path*/) {}
  virtual void warned(const std::string& /*text*/) {}
};

struct TrainRun {
  /// Not owned; null: nothing is saved. Of several ranks, rank 0's alone.
  RunDirectory* directory = nullptr;
  /// Continue from the directory's newest state.
  bool resume = false;
  TrainListener* listener = nullptr;  ///< not owned
  /// Asked before each micro-batch: true means save what there is and return. With
  /// several ranks asked before each window, and one that says true stops all.
  std::function<bool()> stop{};
  std::string export_path;  ///< weights at the end, as safetensors
  std::string tensorboard;  ///< directory for event files; empty: none
};

struct TrainResult {
  TrainSummary summary;
  bool stopped = false;      ///< before its end
  bool save_failed = false;  ///< the last attempt; earlier states are whole
};

/// What a trainer can be given besides its model, data and options.
struct TrainerOptions {
  /// Decides what runs within the budget. Null: one that measures this model is made if
  /// the options ask for a plan.
  std::unique_ptr<BudgetPlanner> planner{};
  /// How the trainer's own planner measures; `progress` is told what it is doing.
  PlanningOptions planning{};
  /// All processes of the group make the same trainer and run it together; the options'
  /// `ranks` is their number. Rank 0 plans, saves, and reads what is resumed. Null: this
  /// process alone.
  std::shared_ptr<RankGroup> ranks{};
};

/// Trains a model on data within a memory budget.
///
///     TrainInputs inputs{model, {"own data", dataset}};
///     TrainConfig options;
///     options.global_batch = 64;
///     options.memory_limit = parse_bytes("8GiB");
///     options.resolve();
///     Trainer trainer(std::move(inputs), options);
///     TrainResult result = trainer.run();
///
/// Equal inputs, options and states of the random generators give equal numbers. A run
/// resumed from a saved state, wherever it was saved, gives the numbers of a run that
/// never stopped (on the CPU bit by bit). If an allocation fails in a window, an evaluation
/// or a save, that part is repeated and ends with the same numbers as long as the
/// micro-batch stays; after eight failures in a row run() throws c10::Error, with all
/// complete updates saved.
class Trainer {
 public:
  /// Moves the model to the options' device and plans the training if the options ask for
  /// it; writes nothing to disk. `options` must be resolved. Throws c10::Error if they
  /// cannot be run: strategy, device, precision, budget.
  ///
  /// With `recompute` "optimal" the micro-batch (if it is open) and the schedule are
  /// planned here. A resumed run should be given the options of its run directory, which
  /// has the micro-batch that was decided.
  Trainer(TrainInputs inputs, const TrainConfig& options,
          TrainerOptions with = {});
  ~Trainer();
  Trainer(Trainer&&) noexcept;
  Trainer& operator=(Trainer&&) noexcept;

  /// The model on its device.
  const Model& model() const;

  /// Trains to the end, or until `run.stop` says so. To be called once.
  TrainResult run(const TrainRun& run = {});

  /// Milliseconds of each window of a run of at most 1,000 windows; waits for the device.
  std::vector<double> window_ms() const;

 private:
  std::unique_ptr<detail::TrainLoop> loop_;
};

}  // namespace reprise
