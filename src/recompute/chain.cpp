#include <reprise/recompute/chain.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace reprise {
namespace {

/// Returns the distinct tensors that `list_of` returns for the modules of all
/// stages.
template <class F>
std::vector<torch::Tensor> distinct(const std::vector<Stage>& stages,
                                    F&& list_of) {
  std::vector<torch::Tensor> tensors;
  std::unordered_set<const void*> seen;
  for (const Stage& stage : stages) {
    for (const auto& module : stage.modules()) {
      for (const torch::Tensor& tensor : list_of(*module)) {
        if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
          tensors.push_back(tensor);
        }
      }
    }
  }
  return tensors;
}

}  // namespace

Chain::Chain(std::vector<Stage> stages)
    : stages_(std::make_shared<const std::vector<Stage>>(std::move(stages))) {
  TORCH_CHECK(!stages_->empty(),
              "[Chain] expected at least one stage, got an empty chain");
}

std::vector<Stage> Chain::stages_of(const torch::nn::Sequential& modules) {
  std::vector<Stage> stages;
  const auto names = modules->named_children().keys();
  size_t i = 0;
  for (const torch::nn::AnyModule& held : *modules) {
    const std::string& name = names.at(i++);
    torch::nn::AnyModule any = held;  // shares the module
    stages.emplace_back(
        name,
        [any, name](const Tensors& inputs) mutable -> Tensors {
          if (inputs.size() == 1) return {any.forward(inputs[0])};
          if (inputs.size() == 2) return {any.forward(inputs[0], inputs[1])};
          TORCH_CHECK(inputs.size() == 3, "[stage '", name,
                      "'] expected one to three tensors, got ", inputs.size());
          return {any.forward(inputs[0], inputs[1], inputs[2])};
        },
        Modules{any.ptr()});
  }
  return stages;
}

std::vector<torch::Tensor> Chain::parameters() const {
  return distinct(*stages_, [](const auto& m) { return m.parameters(); });
}

std::vector<torch::Tensor> Chain::buffers() const {
  return distinct(*stages_, [](const auto& m) { return m.buffers(); });
}

void Chain::train(bool on) const {
  for (const Stage& stage : *stages_) {
    for (const auto& module : stage.modules()) module->train(on);
  }
}

torch::Tensor Chain::forward(const torch::Tensor& input,
                             const Schedule& schedule) const {
  Tensors outputs = forward(Tensors{input}, schedule);
  TORCH_CHECK(outputs.size() == 1,
              "[Chain] expected one output for one input, got ", outputs.size(),
              "; pass a list of tensors to forward()");
  return outputs[0];
}

}  // namespace reprise
