#pragma once

#include "distributed/reducer.h"
#include "train/step/ranks.h"
#include "train/step/train_setup.h"
#include "train/store/state_files.h"

#include <reprise/data/loader.h>
#include <reprise/data/safetensors.h>
#include <reprise/recompute/execution.h>

#include <torch/types.h>

#include <cstdint>
#include <memory>

namespace reprise::detail {

/// Communication between the ranks of a training within a window: gradients,
/// statistics of synchronized BatchNorm and, if they are divided, parameters. There are two implementations: one for a single process, which
/// does nothing, and one for several. Tested by tests/train/step/ranks_test.cpp and
/// tests/distributed/ranked_training_test.cpp.
///
///     exchange.begin_attempt();
///     exchange.begin_window(window, micro_batch, keep_gradients);
///     for each micro-batch:
///       const WindowExchange::MicroBatch scope(exchange, last_of_this_rank);
///       forward and backward with the ExecutionOptions of attach()
///     loss = exchange.finish(loss);  // `.grad` is the sum over all ranks
class WindowExchange {
 public:
  virtual ~WindowExchange() = default;

  /// Adds the callback that sends gradients during the backward to `options`.
  /// If `cuts` is true, also adds the stages at which the autograd graph is cut
  /// so that gradients become final early.
  virtual void attach(ExecutionOptions& /*options*/, bool /*cuts*/) {}

  /// Device memory of the exchange. `keeps_gradients`: whether gradients stay where they are.
  virtual ExchangeMemory memory(bool /*keeps_gradients*/) const { return {}; }

  /// What a window sends, besides parameters while stages run.
  virtual WindowTraffic traffic() const { return {}; }

  /// Whether BatchNorm computes its statistics over all ranks. Ranks then wait
  /// for each other within a micro-batch, and must all run the same number of
  /// micro-batches.
  virtual bool syncs_norms() const { return false; }

  /// Returns a guard that suspends the exchange of statistics during its
  /// lifetime, for measurements on a single rank. Null if there is nothing to
  /// suspend.
  virtual std::shared_ptr<void> alone() { return nullptr; }

  virtual void begin_attempt() {}
  /// `visits`: the stages that the operations of a micro-batch visit. Throws c10::Error if
  /// another rank has failed before.
  virtual void begin_window(const Loader::Window& /*window*/,
                            int64_t /*micro_batch*/, bool /*keep_gradients*/,
                            const std::vector<StageVisit>& /*visits*/) {}

  /// Whether this rank must run an empty micro-batch because other ranks have
  /// some left.
  virtual bool needs_empty_micro_batch() const { return false; }

  /// Encloses the forward and backward of one micro-batch. `last` is true for
  /// the last micro-batch of this rank in the window, whose backward makes the
  /// gradients final. `counts` is false if its samples must not contribute to
  /// the statistics.
  class MicroBatch {
   public:
    MicroBatch(WindowExchange& exchange, bool last, bool counts = true)
        : exchange_(exchange),
          reduces_(exchange.begin_micro_batch(last, counts)) {}
    ~MicroBatch() { exchange_.end_micro_batch(); }
    MicroBatch(const MicroBatch&) = delete;
    MicroBatch& operator=(const MicroBatch&) = delete;
    /// Whether gradients are sent during this backward.
    bool reduces() const { return reduces_; }

   private:
    WindowExchange& exchange_;
    bool reduces_;
  };

  /// Waits until all gradients are reduced. Returns the sum of `loss` over all
  /// ranks.
  virtual torch::Tensor finish(const torch::Tensor& loss) { return loss; }

  /// Whether another rank has reported a failure in this attempt.
  virtual bool failed_elsewhere() const { return false; }

  /// Completes the collectives of a window that failed on any rank. The
  /// gradients are invalid afterwards.
  virtual void abort_attempt() {}

  /// Returns the parameters that this rank's optimizer updates: all of
  /// `parameters`, or the shards of this rank.
  virtual NamedTensors updated_parameters(
      const NamedTensors& parameters) const {
    return parameters;
  }
  virtual bool sharded() const { return false; }
  /// The ranks that share one copy of the state with this one; null for a single process.
  virtual std::shared_ptr<RankGroup> sharing() const { return nullptr; }
  int sharing_ranks() const { return sharing() ? sharing()->size() : 1; }
  /// The ranks of all such groups that have the same pieces; null if there is one group.
  virtual std::shared_ptr<RankGroup> replicas() const { return nullptr; }
  /// Whether this rank's pieces are part of a saved state.
  bool saves_pieces() const {
    return replicas() == nullptr || replicas()->rank() == 0;
  }
  /// Called after an update: copies updated parameters to all ranks. Its allocations are run
  /// through `guarded`.
  using Guard = std::function<void(const std::function<void()>&)>;
  virtual void share_updated(const Guard& /*guarded*/) {}
  /// Gathers the optimizer state of all ranks on rank 0.
  virtual NamedTensors whole_state(NamedTensors own) { return own; }
  /// Divides an optimizer state into tensors that each rank has whole and pieces.
  virtual StatePart part_of_state(NamedTensors own) const {
    return {std::move(own), {}};
  }
  /// Returns the part of a gathered optimizer state that belongs to this rank.
  virtual NamedTensors own_state(NamedTensors whole) const { return whole; }

  /// Of the parameters; null if each rank has all of them.
  virtual const ShardedParameters* sharded_parameters() const {
    return nullptr;
  }
  /// Counters of gradient reductions; null for a single process.
  virtual const GradientReducer::Counters* counters() const { return nullptr; }

 private:
  friend class MicroBatch;
  virtual bool begin_micro_batch(bool /*last*/, bool /*counts*/) {
    return false;
  }
  virtual void end_micro_batch() {}
};

/// A piece for a saved state.
StatePiece state_piece(ParameterShards::Piece piece);

/// Checks that all ranks have the same model and data, and broadcasts the
/// parameters and buffers of rank 0. With Sharding::kParameters, divides the parameters.
/// Throws c10::Error if names, shapes or data differ, or if the options cannot be combined.
std::unique_ptr<WindowExchange> make_window_exchange(Ranks& ranks,
                                                     TrainSetup& setup);

}  // namespace reprise::detail
