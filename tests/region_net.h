#pragma once

#include "support.h"

#include <reprise/recompute/region.h>

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/upsampling.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>

#include <memory>
#include <string>
#include <vector>

namespace reprise::testing {

/// Two convolutions with BatchNorm and dropout.
struct ConvBlockImpl : torch::nn::Module {
  ConvBlockImpl(int64_t in, int64_t out)
      : first(torch::nn::Conv2dOptions(in, out, 3).padding(1)),
        second(torch::nn::Conv2dOptions(out, out, 3).padding(1)),
        norm(out) {
    register_module("first", first);
    register_module("second", second);
    register_module("norm", norm);
    register_module("dropout", dropout);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return dropout(torch::relu(norm(second(torch::relu(first(x))))));
  }
  torch::nn::Conv2d first, second;
  torch::nn::BatchNorm2d norm;
  torch::nn::Dropout dropout{0.1};
};
TORCH_MODULE(ConvBlock);

/// A network with skip connections whose forward is ordinary code: loops, a list
/// of skipped tensors and a branch. Maps {x (N, 2, S, S), y (N, S, S)} to the sum
/// of the losses.
struct RegionNet : torch::nn::Module {
  static constexpr int kLevels = 2;

  explicit RegionNet(int64_t width = 8)
      : head(torch::nn::Conv2dOptions(width, 1, 1)) {
    int64_t channels = 2;
    for (int i = 0; i < kLevels; ++i) {
      const int64_t out = width << i;
      down.push_back(register_module("down" + std::to_string(i),
                                     ConvBlock(channels, out)));
      channels = out;
    }
    for (int i = kLevels; i-- > 0;) {
      const int64_t out = width << i;
      up.push_back(register_module("up" + std::to_string(i),
                                   ConvBlock(channels + out, out)));
      channels = out;
    }
    register_module("head", head);
  }

  Tensors forward(const Tensors& in) {
    torch::Tensor x = in[0];
    std::vector<torch::Tensor> skips;
    for (int i = 0; i < kLevels; ++i) {
      x = region("down" + std::to_string(i), down[static_cast<size_t>(i)], x);
      skips.push_back(x);
      x = torch::max_pool2d(x, 2);
    }
    for (int i = 0; i < kLevels; ++i) {
      const auto join = [block = up[static_cast<size_t>(i)]](
                            const torch::Tensor& low,
                            const torch::Tensor& skip) mutable {
        return block(torch::cat(
            {torch::upsample_nearest2d(low, {skip.size(2), skip.size(3)}),
             skip},
            1));
      };
      x = region("up" + std::to_string(i), join, x, skips.back());
      skips.pop_back();
    }
    if (extra)
      x = region(
          "extra",
          [](const torch::Tensor& t) {
            return torch::gelu(t) * torch::sigmoid(t);
          },
          x);
    return {(head(x).squeeze(1) - in[1]).square().sum()};
  }

  static Tensors inputs(int64_t samples, int64_t side = 16) {
    return {torch::randn({samples, 2, side, side}, on_device()),
            torch::randn({samples, side, side}, on_device())};
  }

  std::vector<ConvBlock> down, up;
  torch::nn::Conv2d head;
  bool extra = false;
};

inline std::shared_ptr<RegionNet> make_region_net(int64_t width = 8) {
  torch::manual_seed(3);
  auto net = std::make_shared<RegionNet>(width);
  net->to(device());
  return net;
}

/// The whole forward as one stage.
inline Chain region_chain(const std::shared_ptr<RegionNet>& net) {
  return Chain({Stage(
      "net", [net](const Tensors& in) { return net->forward(in); }, {net})});
}

}  // namespace reprise::testing
