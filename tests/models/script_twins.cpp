#include "models/script_twins.h"

#include <torch/nn/functional/loss.h>

namespace reprise::testing {
namespace {

namespace F = torch::nn::functional;

/// Gives `script` copies of the tensors that `native` has itself.
void copy_tensors(torch::jit::Module& script, const torch::nn::Module& native) {
  for (const auto& item : native.named_parameters(/*recurse=*/false)) {
    script.register_parameter(
        item.key(), item.value().detach().clone().set_requires_grad(true),
        /*is_buffer=*/false);
  }
  for (const auto& item : native.named_buffers(/*recurse=*/false)) {
    script.register_buffer(item.key(), item.value().clone());
  }
}

void add_copy(torch::jit::Module& script, const std::string& name,
              const torch::nn::Module& native) {
  torch::jit::Module child = empty_script(name);
  copy_tensors(child, native);
  script.register_module(name, child);
}

}  // namespace

Tensors NativeLossImpl::forward(const torch::Tensor& scores,
                                const torch::Tensor& targets) {
  const auto loss = F::cross_entropy(
      scores, targets, F::CrossEntropyFuncOptions().reduction(torch::kSum));
  if (is_training()) return {loss};
  return {loss, scores.argmax(1).eq(targets).sum().to(torch::kDouble)};
}

torch::jit::Module empty_script(const std::string& name) {
  torch::jit::Module module("__torch__." + name);
  module.register_attribute("training", c10::BoolType::get(), true);
  return module;
}

torch::jit::Module script_of(const std::string& code) {
  torch::jit::Module module = empty_script("own");
  module.define(code);
  return module;
}

torch::jit::Module script_block(NativeBlockImpl& native) {
  torch::jit::Module module = empty_script("Block");
  add_copy(module, "conv", *native.conv);
  add_copy(module, "bn", *native.bn);
  module.define(R"(
def forward(self, x: Tensor) -> Tensor:
    y = torch.conv2d(x, self.conv.weight, self.conv.bias, [1, 1], [1, 1])
    if self.training:
        self.bn.num_batches_tracked.add_(1)
    y = torch.batch_norm(y, self.bn.weight, self.bn.bias,
                         self.bn.running_mean, self.bn.running_var,
                         self.training, 0.1, 1e-5, True)
    return x + torch.dropout(torch.relu(y), 0.2, self.training)
)");
  return module;
}

torch::jit::Module script_head(NativeHeadImpl& native) {
  torch::jit::Module module = empty_script("Head");
  add_copy(module, "fc", *native.fc);
  module.define(R"(
def forward(self, x: Tensor) -> Tensor:
    return torch.linear(torch.mean(x, [2, 3]), self.fc.weight, self.fc.bias)
)");
  return module;
}

torch::jit::Module script_loss() {
  // 2 is the sum, in at::Reduction.
  return script_of(R"(
def forward(self, x: Tensor, targets: Tensor) -> List[Tensor]:
    loss = torch.cross_entropy_loss(x, targets, None, 2)
    if self.training:
        return [loss]
    return [loss, torch.sum(torch.eq(torch.argmax(x, 1), targets))]
)");
}

Twins::Twins(int blocks)
    : native({make_stage("none", [](const Tensors& t) { return t; })}),
      root(std::make_shared<torch::nn::Module>()) {
  const auto layers =
      root->register_module("layers", std::make_shared<torch::nn::Module>());
  std::vector<Stage> stages;
  for (int i = 0; i < blocks; ++i) {
    NativeBlock block;
    layers->register_module(std::to_string(i), block);
    names.push_back("layers." + std::to_string(i));
    stages.push_back(make_stage(names.back(), block).on_first());
    scripts.push_back(script_block(*block));
    natives.push_back(block.ptr());
  }
  NativeHead head;
  root->register_module("head", head);
  names.push_back("head");
  stages.push_back(make_stage("head", head).on_first());
  scripts.push_back(script_head(*head));
  natives.push_back(head.ptr());
  NativeLoss loss;
  root->register_module("loss", loss);
  names.push_back("loss");
  stages.push_back(make_stage("loss", loss));
  scripts.push_back(script_loss());
  natives.push_back(loss.ptr());
  native = Chain(std::move(stages));
}

Tensors twin_inputs(int64_t samples) {
  return {torch::randn({samples, kTwinChannels, 8, 8}),
          torch::randint(kTwinClasses, {samples}, torch::kLong)};
}

}  // namespace reprise::testing
