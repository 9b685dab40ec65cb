#include "recompute/stage_graph.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace reprise {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// Root node of a backward. Moves its gradients out when it runs.
class GradientSource : public Node {
 public:
  static std::shared_ptr<GradientSource> make(edge_list edges,
                                              variable_list gradients) {
    std::shared_ptr<GradientSource> node(new GradientSource,
                                         torch::autograd::deleteNode);
    node->set_next_edges(std::move(edges));
    node->gradients_ = std::move(gradients);
    return node;
  }

  variable_list apply(variable_list&&) override {
    return std::exchange(gradients_, {});
  }

 private:
  variable_list gradients_;
};

}  // namespace

std::shared_ptr<GradientCollector> GradientCollector::make() {
  return {new GradientCollector, torch::autograd::deleteNode};
}

torch::Tensor GradientCollector::attach(const torch::Tensor& input) {
  torch::Tensor tensor = input.detach();
  const uint32_t slot = add_input_metadata(tensor);
  torch::autograd::impl::set_gradient_edge(tensor,
                                           Edge(shared_from_this(), slot));
  gradients_.emplace_back();
  return tensor;
}

Tensors GradientCollector::take() {
  return std::exchange(gradients_, {});
}

variable_list GradientCollector::apply(variable_list&& gradients) {
  gradients_ = std::move(gradients);
  return {};
}

Tensors StageGraph::begin(const Tensors& inputs,
                          const std::vector<bool>& requires_grad) {
  collector_ = GradientCollector::make();
  slots_.clear();
  Tensors leaves;
  leaves.reserve(inputs.size());
  int next_slot = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (requires_grad[i]) {
      leaves.push_back(collector_->attach(inputs[i]));
      slots_.push_back(next_slot++);
    } else {
      leaves.push_back(inputs[i].defined() ? inputs[i].detach() : inputs[i]);
      slots_.push_back(-1);
    }
  }
  return leaves;
}

void StageGraph::end(const Tensors& outputs) {
  outputs_.clear();
  for (const torch::Tensor& output : outputs) {
    outputs_.push_back(output.defined() && output.requires_grad()
                           ? torch::autograd::impl::gradient_edge(output)
                           : Edge());
  }
}

Tensors StageGraph::backward(Tensors output_gradients, bool accumulate) {
  TORCH_INTERNAL_ASSERT(output_gradients.size() == outputs_.size());
  edge_list edges;
  variable_list gradients;
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (!outputs_[i].is_valid() || !output_gradients[i].defined()) continue;
    edges.push_back(std::move(outputs_[i]));
    gradients.push_back(std::move(output_gradients[i]));
  }
  outputs_.clear();

  Tensors collected(static_cast<size_t>(collector_->num_inputs()));
  if (!edges.empty()) {
    // The engine requires a tensor for the root. An empty one on the gradients'
    // device also determines the stream.
    const torch::Tensor start = gradients[0].new_empty({0});
    auto root = GradientSource::make(std::move(edges), std::move(gradients));
    root->add_input_metadata(start);
    edge_list wanted;
    if (!accumulate) {
      for (uint32_t i = 0; i < collector_->num_inputs(); ++i) {
        wanted.emplace_back(collector_, i);
      }
    }
    // Without named outputs the engine would run the whole graph.
    if (accumulate || !wanted.empty()) {
      const Edge origin(std::move(root), 0);
      variable_list found = Engine::get_default_engine().execute(
          {origin}, {start}, /*keep_graph=*/false, /*create_graph=*/false,
          accumulate, wanted);
      collected = accumulate ? collector_->take() : std::move(found);
    }
  }
  Tensors result;
  for (const int slot : slots_) {
    result.push_back(slot < 0
                         ? torch::Tensor()
                         : std::move(collected[static_cast<size_t>(slot)]));
  }
  collector_.reset();
  return result;
}

std::vector<bool> find_shared_graphs(const Schedule& schedule) {
  const auto n = static_cast<size_t>(schedule.stages());
  const auto& ops = schedule.ops();
  std::vector<size_t> kept_at(n);
  std::vector<size_t> back_at(n);
  for (size_t at = 0; at < ops.size(); ++at) {
    const auto i = static_cast<size_t>(ops[at].stage);
    if (ops[at].kind == OpKind::kForwardKeep) kept_at[i] = at;
    if (ops[at].kind == OpKind::kBackward) back_at[i] = at;
  }
  std::vector<bool> shares_graph(n, false);
  for (size_t i = 1; i < n; ++i) {
    shares_graph[i] =
        kept_at[i] == kept_at[i - 1] + 1 && back_at[i - 1] == back_at[i] + 1;
  }
  return shares_graph;
}

}  // namespace reprise
