#pragma once

#include "compat/work_lane.h"
#include "recompute/stage_visits.h"

#include <reprise/recompute/chain.h>
#include <reprise/recompute/execution.h>

#include <torch/types.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace reprise::detail {

/// Parameters of a chain that are on the device only while a stage that uses them runs. They
/// are fetched ahead of a forward and of a backward, and leave afterwards. A subclass knows
/// where they are otherwise: in host memory, or divided among ranks.
///
///     chain = StageParameters::wrapped(chain, parameters);
///     Execution execution(chain, schedule,
///                         {.memory = parameters.get(), .cuts = parameters->cuts()});
///     for each micro-batch:
///       parameters->begin(stage_visits(schedule));
///       execution.forward(…), execution.backward(…);
///       parameters->end();
///
/// A parameter that is not there has its shape and its device, but no memory: it must not be
/// read. Parameters are fetched in units, which are in use by the same stages. Not
/// thread-safe. Tested by tests/recompute/host_parameters_test.cpp and
/// tests/distributed/sharded_parameters_test.cpp.
class StageParameters : public ExecutionObserver {
 public:
  /// Returns the chain with stages that bring their parameters in if nothing else has done it.
  /// Without begin(), the parameters stay until another stage runs.
  static Chain wrapped(const Chain& chain,
                       const std::shared_ptr<StageParameters>& parameters);

  /// Whether parameters leave the device. If not, nothing is fetched.
  virtual bool away() const = 0;
  /// Stages at which autograd graphs must be cut: all but the first.
  std::vector<int> cuts() const;

  /// Begins a micro-batch whose operations visit stages in this order. If parameters are
  /// updated on a `lane`, copies of them wait for it; it must be valid until end().
  void begin(const std::vector<StageVisit>& visits,
             compat::WorkLane* lane = nullptr);
  void before(const Op& op) override;
  /// Without begin(): brings the parameters of a stage in, and lets those of others leave.
  void bring(int stage);
  /// Ends a micro-batch: all parameters leave.
  void end();
  /// Drops what is on the device after a failure.
  virtual void abandon() = 0;

 protected:
  /// The units of each stage.
  explicit StageParameters(std::vector<std::vector<size_t>> units_of_stage);

  /// Starts to fetch a unit if it is not there. `backward`: whether the stage's backward
  /// follows.
  virtual void start_fetch(size_t unit, bool backward) = 0;
  virtual void finish_fetch(size_t unit) = 0;
  /// Lets a unit leave if it is there.
  virtual void leave(size_t unit) = 0;
  /// Waits until at most this many units are still leaving.
  virtual void wait_for_left(size_t /*remaining*/) {}
  /// Whether bring() has nothing to do.
  virtual bool readable() const { return false; }
  /// Called after bring().
  virtual void brought(int /*stage*/) {}

  /// Moves on to the next visit: its units are there afterwards, those of the visit after it
  /// are on the way.
  void advance();

  bool running() const { return running_; }
  /// Of the micro-batch in progress; may be null.
  compat::WorkLane* lane() const { return lane_; }
  size_t units() const { return units_; }
  /// Visits of this micro-batch that have not begun.
  size_t visits_left() const { return visits_.size() - visit_; }
  /// The visit that began last; null if there is none.
  const StageVisit* last_visit() const {
    return visit_ > 0 ? &visits_[visit_ - 1] : nullptr;
  }
  /// Ends a micro-batch without letting anything leave.
  void stop();

 private:
  void fetch(const StageVisit& visit, bool wait);

  std::vector<std::vector<size_t>> units_of_stage_;
  size_t units_ = 0;
  std::vector<StageVisit> visits_;
  size_t visit_ = 0;      // next one
  bool running_ = false;  // between begin() and end()
  compat::WorkLane* lane_ = nullptr;
};

/// The memory of `tensor`'s storage, which does not own it; null for none. What it owned is
/// freed.
void set_storage_memory(const torch::Tensor& tensor, void* data);

/// A tensor of the same shape on `device`, without memory.
torch::Tensor without_memory(const torch::Tensor& tensor, torch::Device device);

}  // namespace reprise::detail
