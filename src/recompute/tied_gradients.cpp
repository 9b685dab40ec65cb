#include "recompute/tied_gradients.h"

#include <reprise/ops/weight_copies.h>

#include <torch/csrc/autograd/grad_mode.h>

#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace reprise {

std::vector<TiedParameter> tied_parameters(const Chain& chain) {
  std::vector<TiedParameter> tied;
  struct Use {
    int stages = 0;
    int first = 0;
  };
  std::unordered_map<const void*, Use> uses;
  for (int i = 0; i < chain.size(); ++i) {
    std::unordered_set<const void*> here;
    for (const auto& module : chain[i].modules()) {
      for (const torch::Tensor& parameter : module->parameters()) {
        const void* key = parameter.unsafeGetTensorImpl();
        if (!here.insert(key).second) continue;
        Use& use = uses[key];
        if (++use.stages == 1) use.first = i;
        if (use.stages == 2) tied.push_back({parameter, use.first});
      }
    }
  }
  return tied;
}

TiedGradients::TiedGradients(const std::vector<TiedParameter>& parameters) {
  for (auto [parameter, first] : parameters) {
    if (!parameter.grad().defined() || WeightCopies::has(parameter)) continue;
    auto gradient = std::exchange(parameter.mutable_grad(), {});
    aside_.push_back({std::move(parameter), std::move(gradient), first});
  }
}

TiedGradients::~TiedGradients() {
  finish(0);
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
