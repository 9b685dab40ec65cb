#include "models/layers.h"

#include "models/lora_adapter.h"
#include "models/loss.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace reprise::detail {

using torch::Tensor;
using torch::nn::Linear;

void check_image_size(const std::string& name, const ModelOptions& options,
                      bool supported, const std::string& sizes) {
  TORCH_CHECK(supported, "[model ", name, "] cannot take image size ",
              options.image_size, "; it can take ", sizes);
}

ModulePtr add_container(torch::nn::Module& parent, const std::string& name) {
  return parent.register_module(name, std::make_shared<torch::nn::Module>());
}

void normal_init(Tensor weight, double deviation) {
  // Fewer values take less than a hundredth of a second.
  constexpr int64_t kMany = int64_t{1} << 20;
  constexpr int64_t kBlock = int64_t{1} << 16;
  if (weight.numel() < kMany || !weight.is_cpu() || !weight.is_contiguous()) {
    torch::nn::init::normal_(weight, 0, deviation);
    return;
  }
  // Blocks have generators of their own, so that threads can fill them. Values do not depend on
  // the number of threads.
  const torch::NoGradGuard no_grad;
  const auto seed = static_cast<uint64_t>(
      torch::randint(std::numeric_limits<int64_t>::max(), {1}, torch::kLong)
          .item<int64_t>());
  const Tensor flat = weight.view(-1);
  const int64_t blocks = (flat.numel() + kBlock - 1) / kBlock;
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    const torch::NoGradGuard without;  // modes belong to threads
    for (int64_t i = begin; i < end; ++i) {
      const int64_t count = std::min(kBlock, flat.numel() - i * kBlock);
      flat.narrow(0, i * kBlock, count)
          .normal_(
              0, deviation,
              at::detail::createCPUGenerator(seed + static_cast<uint64_t>(i)));
    }
  });
}

void zero_init(Tensor bias) {
  torch::nn::init::zeros_(bias);
}

Stage make_linear_stage(const std::string& name, const Linear& layer) {
  return make_stage(name,
                    [layer](const Tensor& x) { return run_linear(layer, x); },
                    {layer.ptr()})
      .on_first();
}

void add_classifier(BuiltModel& built, const std::string& name, Linear head) {
  built.root->register_module(name, head);
  built.stages.push_back(make_linear_stage(name, head));
  const auto loss = built.root->register_module("loss", Loss(Task::kImages));
  built.stages.push_back(make_stage("loss", loss));
}

std::vector<std::vector<Tensor>> packed_groups_of(
    const std::vector<LoraLinear>& layers) {
  std::vector<Tensor> weights, biases;
  for (const LoraLinear& layer : layers) {
    weights.push_back(layer->weight);
    if (layer->bias.defined()) biases.push_back(layer->bias);
  }
  if (biases.empty()) return {weights};
  return {weights, biases};
}

Tensor run_joined(const std::vector<LoraLinear>& layers, const Tensor& x) {
  const auto is_adapted = [](const LoraLinear& layer) {
    return LoraAccess::adapter(*layer.ptr()) != nullptr;
  };
  if (std::any_of(layers.begin(), layers.end(), is_adapted)) return {};
  const auto groups = packed_groups_of(layers);
  return ops::joined_linear(
      x, groups[0], groups.size() > 1 ? groups[1] : std::vector<Tensor>{});
}

std::vector<Tensor> run_packed(const std::vector<LoraLinear>& layers,
                               const Tensor& x) {
  const auto groups = packed_groups_of(layers);
  auto outputs = ops::packed_linear(
      x, groups[0], groups.size() > 1 ? groups[1] : std::vector<Tensor>{});
  for (size_t i = 0; i < layers.size(); ++i) {
    outputs[i] = layers[i]->add_adapter(x, outputs[i]);
  }
  return outputs;
}

void add_hidden_layer(BuiltModel& built, const std::string& name,
                      LoraLinear linear, double dropout) {
  built.root->register_module(name, linear);
  built.stages.push_back(
      make_stage(name,
                 [linear, dropout](const Tensor& x) mutable {
                   const Tensor y =
                       relu_inplace(run_linear(linear, x.flatten(1)));
                   if (dropout == 0) return y;
                   return torch::dropout(y, dropout, linear->is_training());
                 },
                 {linear.ptr()})
          .of_kind("hidden")
          .on_first());
}

}  // namespace reprise::detail
