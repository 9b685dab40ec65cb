#pragma once

#include "train/step/ranks.h"
#include "train/step/train_setup.h"

#include <reprise/data/loader.h>
#include <reprise/data/safetensors.h>
#include <reprise/distributed/reducer.h>
#include <reprise/recompute/execution.h>

#include <torch/types.h>

#include <cstdint>
#include <memory>

namespace reprise::detail {

/// What the ranks of a training exchange within a window: gradients, statistics of
/// synchronised BatchNorm and, with a sharded optimizer, updated parameters. There are two
/// implementations: a single process, which exchanges nothing, and several.
///
///     exchange.begin_attempt();
///     exchange.begin_window(window, micro_batch, keep_gradients);
///     for each micro-batch:
///       const WindowExchange::MicroBatch scope(exchange, last_of_this_rank);
///       forward and backward, by an execution with the options of attach()
///     loss = exchange.finish(loss);   // `.grad` are the sums over all ranks
class WindowExchange {
 public:
  virtual ~WindowExchange() = default;

  /// Adds the callback by which gradients are sent during the backward, and with `cuts`
  /// the stages at which the chain is cut for that.
  virtual void attach(ExecutionOptions& /*options*/, bool /*cuts*/) {}

  /// Device memory that the exchange takes besides the gradients.
  virtual int64_t extra_bytes() const { return 0; }

  /// Whether BatchNorm takes its statistics over all ranks. Ranks then wait for each other
  /// within a micro-batch, and all of them run equally many.
  virtual bool syncs_norms() const { return false; }

  /// Suspends the exchange of statistics while it lives, for measurements that one rank
  /// makes by itself. Null if there is nothing to suspend.
  virtual std::shared_ptr<void> alone() { return nullptr; }

  virtual void begin_attempt() {}
  virtual void begin_window(const Loader::Window& /*window*/,
                            int64_t /*micro_batch*/, bool /*keep_gradients*/) {}

  /// Whether other ranks have micro-batches left that this one must accompany with empty
  /// ones.
  virtual bool needs_empty_micro_batch() const { return false; }

  /// Encloses the forward and backward of one micro-batch. `last`: this rank has no
  /// further one, so that its gradients are final. `counts`: its samples belong to the
  /// statistics.
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

  /// Waits for the sums of all gradients. Returns the sum of `loss` over all ranks.
  virtual torch::Tensor finish(const torch::Tensor& loss) { return loss; }

  /// Whether another rank has reported a failure in this attempt.
  virtual bool failed_elsewhere() const { return false; }

  /// Takes part in the rest of a window that failed here or elsewhere. The sums are
  /// worthless afterwards.
  virtual void abort_attempt() {}

  /// Parameters that this rank's optimizer updates: all of `parameters`, or its shards.
  virtual NamedTensors updated_parameters(
      const NamedTensors& parameters) const {
    return parameters;
  }
  virtual bool sharded() const { return false; }
  /// After an update: brings all parameters up to date on all ranks.
  virtual void share_updated() {}
  /// Optimizer state of all ranks in one list, on rank 0; and this rank's part of it.
  virtual NamedTensors whole_state(NamedTensors own) { return own; }
  virtual NamedTensors own_state(NamedTensors whole) const { return whole; }

  /// Null for a single process.
  virtual const GradientReducer::Counters* counters() const { return nullptr; }

 private:
  friend class MicroBatch;
  virtual bool begin_micro_batch(bool /*last*/, bool /*counts*/) {
    return false;
  }
  virtual void end_micro_batch() {}
};

/// Makes the ranks agree on the model and the data first, and gives all of them the
/// parameters and buffers of rank 0. Throws c10::Error if they differ in names, shapes or
/// data, or if the options cannot be combined.
std::unique_ptr<WindowExchange> make_window_exchange(Ranks& ranks,
                                                     const TrainSetup& setup);

}  // namespace reprise::detail
