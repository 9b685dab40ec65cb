#pragma once

#include <reprise/distributed/group.h>
#include <reprise/train/config.h>
#include <reprise/train/planning.h>
#include <reprise/train/run_directory.h>
#include <reprise/train/summary.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace reprise {
namespace detail {
class Session;
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

/// A training, ready to run.
///
///     TrainConfig config;
///     config.model = "gpt2";
///     config.resolve();
///     Training training(config);
///     TrainResult result = training.run();
///
/// The same configuration gives the same numbers; continued from a saved state,
/// wherever it was taken, the same as without a stop (on the CPU in every bit).
/// Where an allocation fails, in a window, an evaluation or a save, that piece
/// starts again, and ends with the same numbers as long as the micro-batch stays;
/// after eight failures in a row run() throws c10::Error, with all complete
/// updates saved.
class Training {
 public:
  /// `config` must be resolved. Makes the model and opens the data; writes
  /// nothing. Throws c10::Error where the configuration cannot be run: model and
  /// its options, weights, data, strategy, device, precision.
  ///
  /// With `recompute` "optimal" the micro-batch (where it is open) and the schedule
  /// are planned here, by `planner` or, where that is null, by one that measures
  /// this model; a continued run should be given the configuration of its
  /// directory, which has the micro-batch that was decided. `planning.progress` is
  /// told what is being measured meanwhile.
  ///
  /// With `ranks`, all of its processes make the same training and run it together;
  /// `config.ranks` is their number. Rank 0 plans, saves, and loads what is resumed.
  explicit Training(const TrainConfig& config,
                    std::unique_ptr<BudgetPlanner> planner = nullptr,
                    const PlanningOptions& planning = {},
                    std::shared_ptr<RankGroup> ranks = nullptr);
  ~Training();
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  /// Once.
  TrainResult run(const TrainRun& run = {});

 private:
  std::unique_ptr<detail::Session> session_;
};

}  // namespace reprise
