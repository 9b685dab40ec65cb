#include "accumulate/small_gradients.h"

#include "compat/foreach.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace reprise {

SmallGradients::SmallGradients(const std::vector<torch::Tensor>& parameters) {
  for (torch::Tensor parameter : parameters) {
    torch::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined() || gradient.layout() != torch::kStrided) continue;
    auto before = std::exchange(gradient, {});
    aside_.emplace_back(std::move(parameter), std::move(before));
  }
}

SmallGradients::~SmallGradients() {
  for (auto& [parameter, before] : aside_) parameter.mutable_grad() = before;
}

void SmallGradients::add() {
  std::vector<torch::Tensor> sums, terms;
  for (auto& [parameter, before] : aside_) {
    torch::Tensor& gradient = parameter.mutable_grad();
    if (gradient.defined()) {
      sums.push_back(before);
      terms.push_back(std::move(gradient));
    }
    gradient = before;
  }
  compat::add_list(sums, terms);
  aside_.clear();
}

std::vector<torch::Tensor> smallest_parameters(
    std::vector<torch::Tensor> parameters, double share) {
  std::stable_sort(parameters.begin(), parameters.end(),
                   [](const torch::Tensor& a, const torch::Tensor& b) {
                     return a.numel() < b.numel();
                   });
  constexpr int64_t kMaxElements =
      65'536;  // larger kernels run longer than their launch
  double left = 0;
  for (const auto& parameter : parameters) {
    left += share * static_cast<double>(parameter.numel());
  }
  size_t count = 0;
  for (; count < parameters.size(); ++count) {
    const int64_t values = parameters[count].numel();
    left -= static_cast<double>(values);
    if (left < 0 || values > kMaxElements) break;
  }
  parameters.resize(count);
  return parameters;
}

std::vector<torch::Tensor> without(std::vector<torch::Tensor> parameters,
                                   const std::vector<torch::Tensor>& excluded) {
  std::unordered_set<const c10::TensorImpl*> keys;
  for (const auto& tensor : excluded) keys.insert(tensor.unsafeGetTensorImpl());
  std::erase_if(parameters, [&](const torch::Tensor& parameter) {
    return keys.contains(parameter.unsafeGetTensorImpl());
  });
  return parameters;
}

}  // namespace reprise
