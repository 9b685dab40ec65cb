#include "recompute/no_save_scope.h"
#include "recompute/recompute_context.h"
#include "recompute/stage_checks.h"
#include "recompute/stage_graph.h"

#include <reprise/recompute/check_chain.h>

#include <fmt/format.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <sstream>
#include <unordered_set>

namespace reprise {
namespace {

using detail::stage_text;
using torch::autograd::Node;

constexpr const char* kCheckChain = "check_chain";

/// Returns the leaves of the autograd graph of `outputs`, in no particular
/// order.
Tensors leaves_of(const Tensors& outputs) {
  Tensors leaves;
  std::vector<Node*> open;
  std::unordered_set<const Node*> seen;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const auto& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    if (output.is_leaf()) leaves.push_back(output);
    visit(output.grad_fn().get());
  }
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      leaves.push_back(leaf->variable);
    }
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return leaves;
}

bool holds(const Stage& stage, const torch::Tensor& parameter) {
  return std::any_of(
      stage.modules().begin(), stage.modules().end(), [&](const auto& module) {
        const auto list = module->parameters();
        return std::any_of(list.begin(), list.end(), [&](const auto& other) {
          return other.is_same(parameter);
        });
      });
}

/// Describes a leaf by its shape, and by its name if a stage has it.
std::string leaf_text(const Chain& chain, const torch::Tensor& leaf) {
  std::ostringstream text;
  text << "a parameter of type " << leaf.dtype() << ' ' << leaf.sizes();
  for (int i = 0; i < chain.size(); ++i) {
    for (const auto& module : chain[i].modules()) {
      for (const auto& item : module->named_parameters()) {
        if (!item.value().is_same(leaf)) continue;
        text << ", '" << item.key() << "' of " << stage_text(chain, i) << ',';
        return text.str();
      }
    }
  }
  return text.str();
}

void check_leaves(const Chain& chain, int i, const Tensors& outputs) {
  for (const auto& leaf : leaves_of(outputs)) {
    TORCH_CHECK(holds(chain[i], leaf), "[", kCheckChain, "] expected ",
                stage_text(chain, i),
                " to use parameters of its modules only, got ",
                leaf_text(chain, leaf),
                " that is not among them; it gets gradients, but its stage's "
                "memory and gradients are not planned: list its module in "
                "`modules`");
  }
}

void check_gradient(const Chain& chain, int i,
                    const std::vector<bool>& requires_grad,
                    const Tensors& outputs) {
  const bool wanted = std::find(requires_grad.begin(), requires_grad.end(),
                                true) != requires_grad.end();
  const bool given =
      std::any_of(outputs.begin(), outputs.end(), [](const auto& output) {
        return output.defined() && output.requires_grad();
      });
  TORCH_CHECK(!wanted || given, "[", kCheckChain, "] expected ",
              stage_text(chain, i),
              " to return a tensor that requires a gradient, as its inputs do, "
              "got none; the stages before it would not be trained: return a "
              "result that is neither detached nor computed without grad mode");
}

}  // namespace

void check_chain(const Chain& chain, const Tensors& inputs) {
  TORCH_CHECK(torch::GradMode::is_enabled(),
              "[check_chain] expected grad mode to be on, got off");
  TORCH_CHECK(!inputs.empty(),
              "[check_chain] expected at least one input, got none");
  Tensors current = inputs;
  std::vector<bool> requires_grad;
  for (const auto& input : inputs) {
    requires_grad.push_back(input.defined() && input.requires_grad());
  }
  for (int i = 0; i < chain.size(); ++i) {
    const Stage& stage = chain[i];
    detail::check_input_count(kCheckChain, chain, i, current.size());
    std::vector<int64_t> versions;
    for (const auto& tensor : current) {
      versions.push_back(detail::version_of(tensor));
    }
    const RecomputeContext context(current, stage.modules());
    StageGraph graph;
    Tensors outputs;
    try {
      const RecomputeGuard guard(context);
      const NoSaveScope no_save;
      const CurrentModules modules(stage.modules());
      outputs = stage(graph.begin(current, requires_grad));
    } catch (c10::Error& error) {
      error.add_context("in " + stage_text(chain, i));
      throw;
    }
    detail::check_outputs(kCheckChain, chain, i, outputs);
    for (size_t k = 0; k < current.size(); ++k) {
      TORCH_CHECK(detail::version_of(current[k]) == versions[k], "[",
                  kCheckChain, "] expected ", stage_text(chain, i),
                  " to leave its inputs unchanged, got input ", k,
                  " modified in place; merge the stage with the one before it, "
                  "or use an out-of-place operator");
    }
    check_leaves(chain, i, outputs);
    check_gradient(chain, i, requires_grad, outputs);
    requires_grad.clear();
    current.clear();
    for (const auto& output : outputs) {
      requires_grad.push_back(output.defined() && output.requires_grad());
      current.push_back(output.defined() ? output.detach() : output);
    }
  }
}

}  // namespace reprise
