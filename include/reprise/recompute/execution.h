#pragma once

#include <reprise/memory/kept.h>
#include <reprise/recompute/chain.h>
#include <reprise/recompute/schedule.h>

#include <ATen/core/Generator.h>

#include <functional>
#include <memory>
#include <vector>

namespace reprise {

/// Callbacks for every operation of an execution, on the thread that runs it.
/// If stages share an autograd graph, the backward operation of the last of
/// them does the work of all, and the others do nothing.
class ExecutionObserver {
 public:
  virtual ~ExecutionObserver() = default;
  virtual void before(const Op&) {}
  virtual void after(const Op&) {}
};

struct ExecutionOptions {
  /// Counts the memory kept for the backward pass, per stage. Not owned; may be
  /// null.
  const KeptMeter* meter = nullptr;
  /// Called before and after each operation. Not owned; may be null.
  ExecutionObserver* observer = nullptr;
  /// Called around `observer`. Provides the memory of stages, such as parameters that are in
  /// host memory. Not owned; may be null.
  ExecutionObserver* memory = nullptr;
  /// Random generators that stages use besides LibTorch's default ones.
  std::vector<at::Generator> generators{};
  /// Gives each stage its own autograd graph and backward call, so that an
  /// observer sees the backward of each stage. This is slower.
  bool separate_graphs = false;
  /// Stages that start a new autograd graph even if the schedule would let them
  /// share the graph of the stage before, so that `final_from` is called
  /// earlier. Results are the same.
  std::vector<int> cuts{};
  /// Called during backward(), on its thread, after the backward of each
  /// autograd graph if gradients are accumulated: the `.grad` of every
  /// parameter that no stage before `stage` uses has its final value. The last
  /// call has `stage` 0. Exceptions propagate out of backward().
  std::function<void(int stage)> final_from{};
  /// For continue_backward(): returns whether `memory` brings in the gradient of a parameter
  /// from before the micro-batch again.
  std::function<bool(const torch::Tensor&)> brings_gradient{};
};

/// Runs a chain by a schedule, once forward and once backward, outside of the
/// caller's autograd graph. Training loops use this class. Not thread-safe.
///
///     Execution execution(chain, schedule);
///     Tensors outputs = execution.forward({images, targets});
///     execution.backward({torch::ones_like(outputs[0])});
///
/// Consecutive stages that are kept and whose backwards are consecutive too
/// share one autograd graph, detached at both ends. Its backward is one call of
/// the autograd engine, which adds to the parameters' `.grad`. If nothing is
/// recomputed, that graph is the whole chain, so `none` costs the same as a
/// plain loop. If an operation throws, all kept memory is released before the
/// exception propagates.
class Execution {
 public:
  /// Throws c10::Error if the schedule is for another number of stages or names
  /// a variant that a stage does not have.
  Execution(Chain chain, Schedule schedule, ExecutionOptions options = {});
  ~Execution();
  Execution(Execution&&) noexcept;
  Execution& operator=(Execution&&) noexcept;

  /// Runs the forward pass and returns the outputs, detached. May be called
  /// again after backward(), or without one to start over.
  Tensors forward(const Tensors& inputs);

  /// Runs the backward pass. `gradients` has one gradient per output, which may
  /// be undefined. Returns the gradients of the inputs, undefined for inputs
  /// that require none. Adds to the parameters' `.grad` if `accumulate` is
  /// true. Throws c10::Error if no forward pass is pending.
  Tensors backward(Tensors gradients, bool accumulate = true);

  /// Allows the next backward() to be continued if it fails. The gradients of each autograd
  /// graph's outputs are held until the end of its backward if they have at most
  /// `most_held_bytes`; a backward that fails in another graph cannot be continued. If a
  /// backward that could be continued is not, gradients of earlier micro-batches are lost.
  void allow_continuing(int64_t most_held_bytes);

  /// Returns how many stages, counted from the first one, a failed backward() has left to
  /// do; the gradients of all others were reported to `final_from`. Returns 0 if the
  /// backward cannot be continued: it was not allowed, nothing was reported, `final_from`
  /// threw, a tied parameter may have a part of its gradient, or see allow_continuing().
  int stages_left() const;

  /// Begins to continue a failed backward: runs the forward of the stages_left() stages
  /// again, by a schedule for that many. `inputs`, random generators and buffers must be
  /// those of the failed micro-batch. `observer` and `meter` are not called.
  void rerun_forward(const Tensors& inputs, const Schedule& schedule);

  /// Completes the backward after rerun_forward(), from where it had failed. If either
  /// throws, both may be called again while stages_left() is not 0.
  Tensors continue_backward();

  /// Returns whether a forward pass awaits its backward.
  bool pending() const;

  /// Returns, for each output of the last forward, whether it requires a
  /// gradient.
  const std::vector<bool>& outputs_require_grad() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Returns the number of autograd graphs in an execution of `schedule` with
/// default options.
int graph_count(const Schedule& schedule);

/// Chain::forward() with options. Runs as part of the caller's autograd graph.
Tensors run(const Chain& chain, const Schedule& schedule, const Tensors& inputs,
            const ExecutionOptions& options = {});

}  // namespace reprise
