#include "recompute/tied_gradients.h"

#include <reprise/ops/weight_copies.h>

#include <torch/csrc/autograd/grad_mode.h>

#include <unordered_map>
#include <utility>
#include <vector>

namespace reprise {

std::vector<ParameterUse> parameter_uses(const Chain& chain) {
  std::vector<ParameterUse> uses;
  std::unordered_map<const void*, size_t> place;  // in `uses`
  for (int i = 0; i < chain.size(); ++i) {
    for (const auto& module : chain[i].modules()) {
      for (const torch::Tensor& parameter : module->parameters()) {
        const auto [found, added] =
            place.emplace(parameter.unsafeGetTensorImpl(), uses.size());
        if (added) uses.push_back({parameter, {}});
        auto& stages = uses[found->second].stages;
        if (stages.empty() || stages.back() != i) stages.push_back(i);
      }
    }
  }
  return uses;
}

std::vector<ParameterUse> tied_parameters(const Chain& chain) {
  auto tied = parameter_uses(chain);
  std::erase_if(tied,
                [](const ParameterUse& use) { return use.stages.size() == 1; });
  return tied;
}

TiedGradients::TiedGradients(const std::vector<ParameterUse>& parameters) {
  for (const ParameterUse& use : parameters) {
    torch::Tensor parameter = use.parameter;
    if (!parameter.grad().defined() || WeightCopies::has(parameter)) continue;
    auto gradient = std::exchange(parameter.mutable_grad(), {});
    aside_.push_back(
        {std::move(parameter), std::move(gradient), use.first_stage()});
  }
}

void TiedGradients::finish(int stage) {
  const torch::NoGradGuard no_grad;
  for (auto& [parameter, before, first] : aside_) {
    if (first < stage || !before.defined()) continue;
    torch::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) {
      gradient = before;
    } else if (before.is_sparse()) {
      gradient = gradient + before;
    } else {
      gradient = before.add_(gradient);  // in place, as autograd does
    }
    before.reset();
  }
}

}  // namespace reprise
