#pragma once

#include <reprise/memory/kept.h>
#include <reprise/recompute/chain.h>
#include <reprise/recompute/schedule.h>

#include <ATen/core/Generator.h>

#include <memory>
#include <vector>

namespace reprise {

/// Sees every operation of an execution, on the thread that runs it.
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
};

/// Runs a chain by a schedule, once forward and once backward, without an
/// autograd graph around it: what a training loop uses.
///
///     Execution execution(chain, schedule);
///     Tensors outputs = execution.forward({images, targets});
///     execution.backward({torch::ones_like(outputs[0])});
///
/// Each stage runs on detached inputs and has a graph of its own. The backward
/// of a stage is one ordinary autograd call on that graph, which adds to the
/// parameters' `.grad`. Whatever throws, everything kept is released first.
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

/// Chain::forward() with options: runs inside the caller's autograd graph.
Tensors run(const Chain& chain, const Schedule& schedule, const Tensors& inputs,
            const ExecutionOptions& options = {});

}  // namespace reprise
