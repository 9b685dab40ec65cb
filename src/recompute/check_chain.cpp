#include "recompute/no_save_scope.h"
#include "recompute/recompute_context.h"
#include "recompute/stage_checks.h"
#include "recompute/stage_graph.h"

#include <reprise/recompute/check_chain.h>

#include <fmt/format.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <cmath>
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

/// Runs the stages one after another and saves nothing. Restores buffers and
/// random generators.
Tensors run_unsaved(const Chain& chain, const Tensors& inputs) {
  Tensors current = inputs;
  for (int i = 0; i < chain.size(); ++i) {
    const RecomputeContext context(current, chain[i].modules());
    const RecomputeGuard guard(context);
    const NoSaveScope no_save;
    const CurrentModules modules(chain[i].modules());
    current = chain[i](current);
  }
  return current;
}

/// Returns the inputs with all samples twice; empty if the first dimensions
/// differ.
Tensors twice(const Tensors& inputs) {
  Tensors doubled;
  int64_t samples = -1;
  for (const auto& input : inputs) {
    if (!input.defined()) {
      doubled.push_back(input);
      continue;
    }
    if (input.dim() == 0 || (samples >= 0 && input.size(0) != samples)) {
      return {};
    }
    samples = input.size(0);
    doubled.push_back(torch::cat({input, input}));
  }
  return doubled;
}

}  // namespace

void check_loss(const Chain& chain, const Tensors& inputs) {
  TORCH_CHECK(torch::GradMode::is_enabled(),
              "[check_loss] expected grad mode to be on, got off");
  const Tensors outputs = run_unsaved(chain, inputs);
  const torch::Tensor loss = outputs.empty() ? torch::Tensor() : outputs[0];
  TORCH_CHECK(loss.defined() && loss.numel() == 1 && loss.is_floating_point(),
              "[check_loss] expected the first output of the chain to be the "
              "sum of the losses, one floating-point value, got ",
              loss.defined()
                  ? c10::str(loss.scalar_type(), " of shape ", loss.sizes())
                  : "none",
              "; let the last stage return the sum");
  TORCH_CHECK(loss.requires_grad(),
              "[check_loss] expected a loss that requires a gradient, got one "
              "that does not; compute it from parameters that require "
              "gradients, with grad mode on and without detach()");
  const Tensors doubled = twice(inputs);
  if (doubled.empty()) return;
  const double once = loss.item<double>();
  const double both = run_unsaved(chain, doubled).at(0).item<double>();
  constexpr double kSame = 0.05;
  TORCH_CHECK(once == 0 || !(std::abs(both - once) <= kSame * std::abs(once)),
              "[check_loss] expected the sum of the losses, got a mean: the "
              "loss is ",
              once, ", and ", both,
              " for the same samples twice; the sum is divided by the count of "
              "the whole window later, so let the last stage return the sum");
}

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
