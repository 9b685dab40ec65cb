#include <reprise/accumulate/small_gradients.h>
#include <reprise/torch/lists.h>

#include <utility>

namespace reprise {

SmallGradients::SmallGradients(const std::vector<torch::Tensor>& parameters,
                               int64_t most) {
  for (torch::Tensor parameter : parameters) {
    torch::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined() || gradient.numel() > most ||
        gradient.layout() != torch::kStrided) {
      continue;
    }
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

}  // namespace reprise
