#include "recompute/failed_backward.h"

#include "recompute/stage_checks.h"

#include <reprise/ops/weight_copies.h>

#include <algorithm>
#include <utility>

namespace reprise::detail {

GraphBackward::GraphBackward(int first_stage, int last_stage,
                             Tensors output_gradients,
                             const std::vector<ParameterUse>& uses,
                             const Brings& brings)
    : first_stage_(first_stage),
      last_stage_(last_stage),
      gradients_(std::move(output_gradients)) {
  for (const auto& use : uses) {
    const torch::Tensor gradient = use.parameter.grad();
    if (!gradient.defined() || !this->uses(use)) continue;
    if (use.last_stage() > last_stage ||
        stays_in_place(use.parameter, brings)) {
      partial_.push_back({use.parameter, gradient, version_of(gradient)});
    }
  }
}

bool GraphBackward::uses(const ParameterUse& use) const {
  const auto first =
      std::lower_bound(use.stages.begin(), use.stages.end(), first_stage_);
  return first != use.stages.end() && *first <= last_stage_;
}

bool GraphBackward::can_be_repeated() const {
  return std::all_of(partial_.begin(), partial_.end(), [](const auto& part) {
    // Layers of weights with copies add without a trace.
    return part.parameter.grad().is_same(part.gradient) &&
           version_of(part.gradient) == part.version &&
           !WeightCopies::has(part.parameter);
  });
}

Tensors GraphBackward::take_gradients() {
  return std::move(gradients_);
}

bool stays_in_place(const torch::Tensor& parameter,
                    const GraphBackward::Brings& brings) {
  return WeightCopies::has(parameter) && !(brings && brings(parameter));
}

void drop_gradients(const std::vector<ParameterUse>& uses, int reported,
                    const GraphBackward* running,
                    const GraphBackward::Brings& brings) {
  for (const auto& use : uses) {
    if (use.last_stage() >= reported) continue;
    const bool added_to = running != nullptr && running->uses(use);
    if (!added_to && stays_in_place(use.parameter, brings)) continue;
    torch::Tensor(use.parameter).mutable_grad().reset();
  }
}

Chain first_stages(const Chain& chain, int count) {
  std::vector<Stage> stages;
  for (int i = 0; i < count; ++i) stages.push_back(chain[i]);
  return Chain(std::move(stages));
}

}  // namespace reprise::detail
