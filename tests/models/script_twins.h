#pragma once

#include "support.h"

#include <reprise/recompute/chain.h>

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>

#include <memory>
#include <string>
#include <vector>

/// A small residual network, in C++ and in TorchScript with the same weights.
namespace reprise::testing {

constexpr int64_t kTwinChannels = 4;
constexpr int64_t kTwinClasses = 5;

/// x + dropout(relu(bn(conv(x)))) in C++.
struct NativeBlockImpl : torch::nn::Module {
  NativeBlockImpl() {
    register_module("conv", conv);
    register_module("bn", bn);
    register_module("dropout", dropout);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return x + dropout(torch::relu(bn(conv(x))));
  }
  torch::nn::Conv2d conv{
      torch::nn::Conv2dOptions(kTwinChannels, kTwinChannels, 3).padding(1)};
  torch::nn::BatchNorm2d bn{kTwinChannels};
  torch::nn::Dropout dropout{0.2};
};
TORCH_MODULE(NativeBlock);

/// Mean over the pixels and a linear layer.
struct NativeHeadImpl : torch::nn::Module {
  NativeHeadImpl() { register_module("fc", fc); }
  torch::Tensor forward(const torch::Tensor& x) { return fc(x.mean({2, 3})); }
  torch::nn::Linear fc{kTwinChannels, kTwinClasses};
};
TORCH_MODULE(NativeHead);

/// Cross entropy as the chains of models return it.
struct NativeLossImpl : torch::nn::Module {
  Tensors forward(const torch::Tensor& scores, const torch::Tensor& targets);
};
TORCH_MODULE(NativeLoss);

/// An empty module that has modes.
torch::jit::Module empty_script(const std::string& name);

/// An empty module with this code.
torch::jit::Module script_of(const std::string& code);

/// The same as scripts. They get copies of the tensors.
torch::jit::Module script_block(NativeBlockImpl& native);
torch::jit::Module script_head(NativeHeadImpl& native);
torch::jit::Module script_loss();

/// The same network twice. Both chains map {x, targets} to {sum of losses}.
struct Twins {
  /// Draws the weights from LibTorch's default generator.
  explicit Twins(int blocks = 4);

  /// Names of the stages: "layers.0", …, "head" and "loss".
  std::vector<std::string> names;
  std::vector<torch::jit::Module> scripts;
  Modules natives;
  Chain native;
  /// Owns the modules of `native`: "layers.0.conv.weight", …, "head.fc.bias".
  std::shared_ptr<torch::nn::Module> root;
};

/// Random {x, targets}.
Tensors twin_inputs(int64_t samples = 6);

}  // namespace reprise::testing
