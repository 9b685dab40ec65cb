#pragma once

#include <reprise/data/safetensors.h>
#include <reprise/distributed/group.h>
#include <reprise/train/inputs.h>
#include <reprise/train/options.h>
#include <reprise/train/planning.h>
#include <reprise/train/run_directory.h>
#include <reprise/train/summary.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace reprise {
namespace detail {
class TrainLoop;
}

/// Receives the events of a training. All calls are made on the thread of
/// Trainer::run(). The default implementations do nothing.
class TrainListener {
 public:
  virtual ~TrainListener() = default;

  /// Description of a training.
  struct Start {
    std::string model;  ///< name and number of parameters
    std::string data;
    std::string how;  ///< batch, accumulation, recomputation, precision, device
    int64_t step = 0;         ///< updates done before a resume
    int64_t total_steps = 0;  ///< 0: limited by time
  };
  /// Called once, before the first window.
  virtual void started(const Start&) {}

  /// Progress of a training.
  struct Step {
    int64_t step = 0;         ///< updates done
    int64_t total_steps = 0;  ///< 0: limited by time
    /// Mean over the window of an update; on CUDA not the last one but one whose loss was
    /// known without waiting for the device.
    double loss = 0;
    double rate = 0;           ///< learning rate
    double samples_per_s = 0;  ///< over all ranks
    /// Device memory: live now, peak so far, and budget (0: none).
    int64_t live_bytes = 0, peak_bytes = 0, limit_bytes = 0;
    double left_s = 0;  ///< estimated seconds to the end
  };
  /// Called at most a few times per second, not for every update.
  virtual void stepped(const Step&) {}

  /// Called in every window when its gradients are complete and divided by the loss
  /// scale, before they are clipped. May read and change the `.grad` of `parameters`, on
  /// every rank in the same way. With a sharded optimizer they have no gradients. If an
  /// allocation fails, the window is repeated, and this is called again.
  virtual void gradients_ready(int64_t /*step*/,
                               const NamedTensors& /*parameters*/) {}

  /// Whether gradients_ready() must be called. If it returns true, parameters are not updated
  /// in the backward (TrainOptions::update): there would be no complete gradients. To be
  /// overridden by listeners that do not override gradients_ready().
  virtual bool needs_gradients() const { return true; }

  /// Whether the listener reads parameters, in any of its calls. If it returns false, weights
  /// that have their half-precision copies inside (WeightCopiesMode::kSplit) stay so from
  /// update to update, which saves two passes over them.
  virtual bool reads_parameters() const { return true; }

  /// Called after every update, with their number. The device may still be busy with it.
  virtual void updated(int64_t /*step*/) {}

  /// Called with true when steady training begins or continues, and with false
  /// when it pauses for an evaluation or a save, or ends. Steady training
  /// begins after the two warm-up updates, or at once if there are no further
  /// updates. It never begins if the training is stopped before.
  virtual void training(bool /*active*/) {}

  /// Result of an evaluation on the test data.
  struct Evaluation {
    int64_t step = 0;  ///< updates done
    double loss = 0;   ///< mean
    /// Means of Model::metrics, by name; of built-in models "accuracy", from 0 to 1.
    std::map<std::string, double> metrics{};
  };
  /// Called after each evaluation.
  virtual void evaluated(const Evaluation&) {}
  /// Called after a state was saved; the text names its directory and update.
  virtual void saved(const std::string& /*text*/) {}
  /// Called with a warning for the user.
  virtual void warned(const std::string& /*text*/) {}
};

/// Arguments of Trainer::run().
struct TrainRun {
  /// Directory to save in; not owned. If null, nothing is saved. With several
  /// ranks only rank 0 has one.
  RunDirectory* directory = nullptr;
  /// Continue from the newest state in `directory`, which rank 0 must then have.
  bool resume = false;
  TrainListener* listener = nullptr;  ///< not owned; may be null
  /// Called before each micro-batch, or with several ranks before each window.
  /// If it returns true on any rank, the training saves its state and returns.
  std::function<bool()> stop{};
  /// File for the final weights, in safetensors format; empty: none. The adapters of a
  /// model (models/lora.h) go to a directory of this name instead, unless it ends in
  /// ".safetensors", which gets the merged weights.
  std::string export_path;
  std::string tensorboard;  ///< directory for event files; empty: none
};

/// Result of Trainer::run().
struct TrainResult {
  TrainSummary summary;
  bool stopped = false;  ///< ended early because `stop` returned true
  /// The last attempt to save failed. Earlier states are intact.
  bool save_failed = false;
  /// The resumed run had reached its end before: this process has neither trained nor
  /// evaluated, and the summary has no figures of that.
  bool unchanged = false;
};

/// Optional components of a Trainer.
struct TrainerOptions {
  /// Planner to use. If null and the options ask for a plan, the trainer
  /// creates one that measures its model.
  std::unique_ptr<BudgetPlanner> planner{};
  /// Options of the planner that the trainer creates.
  PlanningOptions planning{};
  /// Group of processes that train together; null: a single process. All of
  /// them create the same trainer and call run(). The `ranks` of the training
  /// options must equal their number. Rank 0 plans, saves and reads saved
  /// states.
  std::shared_ptr<RankGroup> ranks{};
};

/// Trains a model on data within a memory budget.
///
///     TrainOptions options;
///     options.global_batch = 64;
///     options.memory_limit = parse_bytes("8GiB");
///     Trainer trainer(model, dataset, options);
///     TrainResult result = trainer.run();
///
/// Results are reproducible: they depend only on the inputs, the options and
/// the states of the random generators. A resumed run gives the same results as
/// one that was never stopped, at whatever point it was saved (on the CPU they
/// are bit-identical). If an allocation fails in a window, an evaluation or a
/// save, that part is repeated, with the same results unless the micro-batch
/// changes. After eight consecutive failures run() saves all complete updates
/// and throws c10::Error.
///
/// One Trainer of a process may run at a time (c10::Error); see own_loop.h for
/// several models.
class Trainer {
 public:
  /// Moves the model to the device of the options. If `recompute` is "optimal",
  /// plans the schedule, and the micro-batch unless it is given. Writes nothing
  /// to disk except cached measurements. Completes the options as
  /// TrainOptions::resolve() does. Throws c10::Error if they cannot be run:
  /// strategy, device, precision, budget.
  ///
  /// To resume a run, pass the options of its run directory, which contain the
  /// planned micro-batch.
  Trainer(TrainInputs inputs, const TrainOptions& options,
          TrainerOptions with = {});
  /// Overload for training data alone, without an evaluation.
  Trainer(Model model, std::shared_ptr<const Dataset> data,
          const TrainOptions& options, TrainerOptions with = {});
  ~Trainer();
  Trainer(Trainer&&) noexcept;
  Trainer& operator=(Trainer&&) noexcept;

  /// Returns the model, on its device.
  const Model& model() const;

  /// Trains to the end, or until `run.stop` returns true. Must be called at
  /// most once. Throws c10::Error if a state cannot be restored, retries are
  /// exhausted or another rank failed.
  TrainResult run(const TrainRun& run = {});

  /// Returns the milliseconds of each window, for runs of at most 1,000
  /// windows; empty for longer ones. Waits for the device.
  std::vector<double> window_ms() const;

 private:
  std::unique_ptr<detail::TrainLoop> loop_;
};

}  // namespace reprise
