// Chain::forward(): a chain is one node of the caller's autograd graph, whose
// backward runs the second half of the schedule. Tested by
// tests/recompute/chain_test.cpp.
#include <reprise/recompute/execution.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace reprise {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

class ChainNode : public Node {
 public:
  static std::shared_ptr<ChainNode> make(Execution execution) {
    return {new ChainNode(std::move(execution)), torch::autograd::deleteNode};
  }

  Execution& execution() { return execution_; }

  variable_list apply(variable_list&& gradients) override {
    TORCH_CHECK(execution_.pending(),
                "[Chain] the backward of a chain can run only once; run the "
                "forward again");
    TORCH_CHECK(!torch::GradMode::is_enabled(),
                "[Chain] the backward of a chain cannot be differentiated "
                "(create_graph); use checkpoint() for second derivatives");
    // Not empty if the caller asked for certain gradients (autograd::grad).
    // This node cannot return those of parameters, so they are not accumulated
    // either.
    const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
    const bool accumulate = wanted == nullptr || wanted->empty();
    return execution_.backward(std::move(gradients), accumulate);
  }

 private:
  explicit ChainNode(Execution execution) : execution_(std::move(execution)) {}
  Execution execution_;
};

}  // namespace

Tensors run(const Chain& chain, const Schedule& schedule, const Tensors& inputs,
            const ExecutionOptions& options) {
  auto node = ChainNode::make(Execution(chain, schedule, options));
  Tensors outputs = node->execution().forward(inputs);
  if (!node->execution().pending()) return outputs;

  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  const auto& needs_grad = node->execution().outputs_require_grad();
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (needs_grad[i]) {
      torch::autograd::create_gradient_edge(outputs[i], node);
    } else {
      // Keeps the indices of gradients and outputs equal.
      node->add_input_metadata(Node::undefined_input());
    }
  }
  return outputs;
}

Tensors Chain::forward(const Tensors& inputs, const Schedule& schedule) const {
  return run(*this, schedule, inputs);
}

}  // namespace reprise
