#pragma once

#include <reprise/recompute/schedule.h>
#include <reprise/recompute/stage.h>

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

/// The autograd graph of one stage, or of several consecutive ones, detached
/// from the rest of the chain. Tested by tests/recompute/execution_test.cpp.
///
/// A graph is usually detached with a leaf that requires a gradient. However,
/// the gradient accumulator of a leaf holds the leaf, and with it the whole
/// input, for the lifetime of the graph, even if no operator saved it. A custom
/// node as the source of the inputs holds nothing. Likewise, a custom root node
/// releases the gradients of the outputs when it runs, instead of holding them
/// until the backward ends.
namespace reprise {

/// Source node of a stage's inputs. Its backward collects their gradients.
class GradientCollector : public torch::autograd::Node {
 public:
  static std::shared_ptr<GradientCollector> make();

  /// Returns a tensor that shares the memory and version counter of `input` and
  /// whose gradient is collected by this node.
  torch::Tensor attach(const torch::Tensor& input);

  /// Moves out the collected gradients, in the order of the calls of attach().
  Tensors take();

  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override;

 private:
  Tensors gradients_;
};

/// Builds the autograd graph of a run and runs its backward once.
class StageGraph {
 public:
  StageGraph() = default;

  /// Returns detached inputs for the stage. Those with `requires_grad` are
  /// tracked.
  Tensors begin(const Tensors& inputs, const std::vector<bool>& requires_grad);

  /// Records the gradient edges of the stage's outputs.
  void end(const Tensors& outputs);

  /// Runs the backward, which frees the graph. Returns the gradients of the
  /// inputs, undefined for inputs that are not tracked. Adds to the `.grad` of
  /// parameters only if `accumulate` is true.
  Tensors backward(Tensors output_gradients, bool accumulate);

 private:
  std::shared_ptr<GradientCollector> collector_;
  std::vector<int> slots_;  // of each input in collector_; -1 if not tracked
  torch::autograd::edge_list
      outputs_;  // invalid for outputs without a gradient
};

/// Returns, for each stage, whether it shares the autograd graph of the stage
/// before it: both are kept, their runs are consecutive, and so are their
/// backwards.
std::vector<bool> find_shared_graphs(const Schedule& schedule);

}  // namespace reprise
