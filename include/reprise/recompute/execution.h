#pragma once

#include <reprise/memory/kept.h>
#include <reprise/recompute/chain.h>
#include <reprise/recompute/schedule.h>

#include <ATen/core/Generator.h>

#include <functional>
#include <memory>
#include <vector>

namespace reprise {

/// Sees every operation of an execution, on the thread that runs it. Where
/// stages share a graph, the backward of the last of them does the work of all,
/// and theirs find it done.
class ExecutionObserver {
 public:
  virtual ~ExecutionObserver() = default;
  virtual void before(const Op&) {}
  virtual void after(const Op&) {}
};

struct ExecutionOptions {
  /// Counts what is kept, by stage. Not owned; null: nothing is counted.
  const KeptMeter* meter = nullptr;
  /// Not owned; null: nobody watches.
  ExecutionObserver* observer = nullptr;
  /// Generators that stages draw from besides LibTorch's default ones.
  std::vector<at::Generator> generators{};
  /// Gives each stage a graph and a backward call of its own, so that an
  /// observer sees what each backward does; costs time.
  bool separate_graphs = false;
  /// Stages that begin a graph, also where the schedule lets them continue the one
  /// before; so that `final_from` is told sooner. Results are the same.
  std::vector<int> cuts{};
  /// Called in a backward that accumulates, on the thread that called it, after each
  /// graph: the `.grad` of every parameter that no stage before `stage` uses has its
  /// final value. The last call has 0. What it throws ends the backward.
  std::function<void(int stage)> final_from{};
};

/// Runs a chain by a schedule, once forward and once backward, without an
/// autograd graph around it: what a training loop uses.
///
///     Execution execution(chain, schedule);
///     Tensors outputs = execution.forward({images, targets});
///     execution.backward({torch::ones_like(outputs[0])});
///
/// Stages that the schedule keeps in a row, and takes back in a row, share one
/// graph, cut off at both ends; its backward is one ordinary autograd call,
/// which adds to the parameters' `.grad`. With nothing to recompute that is the
/// whole chain, so that `none` costs what a plain loop costs. Whatever throws,
/// everything kept is released first.
class Execution {
 public:
  /// Throws c10::Error where the schedule is for another number of stages.
  Execution(Chain chain, Schedule schedule, ExecutionOptions options = {});
  ~Execution();
  Execution(Execution&&) noexcept;
  Execution& operator=(Execution&&) noexcept;

  /// Outputs, detached. Callable again after a backward, or to start over.
  Tensors forward(const Tensors& inputs);

  /// `gradients` of the outputs, undefined ones for outputs that have none.
  /// Returns the gradients of the inputs, undefined where none is needed. With
  /// `accumulate` off parameters are left alone.
  Tensors backward(Tensors gradients, bool accumulate = true);

  /// True between a forward that kept something and its backward.
  bool pending() const;

  /// For each output of the last forward, whether a gradient can flow into it.
  const std::vector<bool>& outputs_require_grad() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// How many graphs an execution of `schedule` cuts the chain into: stages kept
/// and taken back in a row share one.
int graph_count(const Schedule& schedule);

/// Chain::forward() with options: runs inside the caller's autograd graph.
Tensors run(const Chain& chain, const Schedule& schedule, const Tensors& inputs,
            const ExecutionOptions& options = {});

}  // namespace reprise
