#pragma once

#include <reprise/recompute/stage.h>

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

/// The autograd graph of one run of a stage, or of several in a row, cut off at
/// both ends.
///
/// The usual way to cut is a detached leaf that requires a gradient. But a
/// leaf's gradient accumulator holds the leaf, and with it the whole input, for
/// as long as the graph lives, even where no operator saved it. A node of our
/// own as the inputs' origin holds nothing; and one as the outputs' target
/// hands their gradients over instead of holding them until the stage is done.
namespace reprise {

/// Stands where a stage's inputs come from; its backward collects their
/// gradients.
class InputEnd : public torch::autograd::Node {
 public:
  static std::shared_ptr<InputEnd> make();

  /// A tensor that shares `input`'s memory and version counter and has its
  /// gradient collected here.
  torch::Tensor attach(const torch::Tensor& input);

  /// Collected gradients in the order of `attach` calls.
  Tensors take();

  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override;

 private:
  Tensors gradients_;
};

class StageGraph {
 public:
  StageGraph() = default;

  /// Detached inputs for the stage; those with `requires_grad` are tracked.
  Tensors begin(const Tensors& inputs, const std::vector<bool>& requires_grad);

  /// Takes the ends of the graph from what the stage returned.
  void end(const Tensors& outputs);

  /// Runs the backward, which frees the graph, and returns the gradients of the
  /// inputs, undefined where none is needed.
  Tensors backward(Tensors output_gradients, bool accumulate);

 private:
  std::shared_ptr<InputEnd> input_end_;
  std::vector<int> slots_;  // of each input at input_end_; -1: not tracked
  torch::autograd::edge_list outputs_;  // invalid where no gradient can flow
};

}  // namespace reprise
