#include "tied_gradients.h"

#include <reprise/lean/weight_copies.h>

#include <torch/csrc/autograd/grad_mode.h>

#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace reprise {

Tensors tied_parameters(const Chain& chain) {
  Tensors tied;
  std::unordered_map<const void*, int> stages;  // that have the parameter
  for (int i = 0; i < chain.size(); ++i) {
    std::unordered_set<const void*> here;
    for (const auto& module : chain[i].modules()) {
      for (const torch::Tensor& parameter : module->parameters()) {
        const void* key = parameter.unsafeGetTensorImpl();
        if (!here.insert(key).second) continue;
        if (++stages[key] == 2) tied.push_back(parameter);
      }
    }
  }
  return tied;
}

TiedGradients::TiedGradients(const Tensors& parameters) {
  for (torch::Tensor parameter : parameters) {
    if (!parameter.grad().defined() || WeightCopies::has(parameter)) continue;
    auto gradient = std::exchange(parameter.mutable_grad(), {});
    aside_.push_back({std::move(parameter), std::move(gradient)});
  }
}

TiedGradients::~TiedGradients() {
  const torch::NoGradGuard no_grad;
  for (auto& [parameter, before] : aside_) {
    torch::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) {
      gradient = before;
    } else if (before.is_sparse()) {
      gradient = gradient + before;
    } else {
      gradient = before.add_(gradient);  // in place, as autograd does
    }
  }
}

}  // namespace reprise
