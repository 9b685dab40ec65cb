// Tested by tests/models/zoo_test.cpp.
#include "models/layers.h"

#include <reprise/ops/batch_norm.h>
#include <reprise/ops/norm.h>
#include <reprise/ops/pool.h>

#include <torch/nn.h>

#include <algorithm>
#include <functional>

namespace reprise::detail {
namespace {

using torch::Tensor;
using torch::nn::Conv2d;
using torch::nn::Conv2dOptions;
using torch::nn::Linear;

BuiltModel build_cnn_basic(const std::string& name,
                           const ModelOptions& options) {
  // Images of `side` pixels enter at the convolution with `next` channels.
  struct Step {
    int64_t next, side;
  };
  static constexpr Step kSteps[] = {{8, 3584}, {16, 1792}, {24, 896}, {32, 448},
                                    {40, 224}, {48, 112},  {56, 56},  {64, 28},
                                    {72, 0},   {80, 0},    {88, 0},   {96, 0}};
  BuiltModel built;
  int64_t channels = options.channels;
  bool entered = false;
  for (const auto& [next, side] : kSteps) {
    entered = entered || side == options.image_size;
    if (!entered) continue;
    const bool first = built.stages.empty();
    const std::string block = "block" + std::to_string(built.stages.size());
    const auto part = add_container(*built.root, block);
    auto conv =
        part->register_module("conv", Conv2d(Conv2dOptions(channels, next, 2)
                                                 .stride(2)
                                                 .padding(next == 80 ? 1 : 0)));
    // relu(norm(x))
    std::function<Tensor(const Tensor&)> norm_relu;
    if (options.norm == "batch") {
      const SyncBatchNorm2d batch(next);
      part->register_module("norm", batch);
      norm_relu = [batch](const Tensor& x) { return ops::norm_act(batch, x); };
    } else {
      const torch::nn::GroupNorm group(
          torch::nn::GroupNormOptions(next / 8, next));
      part->register_module("norm", group);
      norm_relu = [group](const Tensor& x) { return ops::norm_act(group, x); };
    }
    built.stages.push_back(
        make_stage(block,
                   [conv, norm_relu, first](const Tensor& x) {
                     return norm_relu(run_conv(conv, x, first));
                   },
                   {part})
            .on_first());
    channels = next;
  }
  check_image_size(name, options, entered,
                   "28, 56, 112, 224, 448, 896, 1792, 3584");
  add_hidden_layer(built, "hidden", LoraLinear(channels, 32));
  add_classifier(built, "head", Linear(32, options.classes));
  return built;
}

BuiltModel build_cnn_blocks(const std::string& name,
                            const ModelOptions& options) {
  check_image_size(name, options,
                   options.image_size >= int64_t{1} << options.depth,
                   "those that can be halved once per block");
  BuiltModel built;
  int64_t channels = options.channels;
  for (int64_t i = 0; i < options.depth; ++i) {
    // Doubles twice, then stays the same.
    const int64_t next = options.width << std::min<int64_t>(i, 2);
    const bool first = i == 0;
    const std::string block = "block" + std::to_string(i);
    const auto part = add_container(*built.root, block);
    auto conv = part->register_module(
        "conv", Conv2d(Conv2dOptions(channels, next, 3).padding(1)));
    auto norm = part->register_module("norm", SyncBatchNorm2d(next));
    const auto run = [conv, norm, first](const Tensor& x, bool compact) {
      return ops::norm_act(
          norm, run_conv(conv, x, first),
          {.pool = ops::MaxPoolOptions{}, .compact_pool = compact});
    };
    built.stages.push_back(
        make_stage(block,
                   [run](const Tensor& x) { return run(x, /*compact=*/false); },
                   {part})
            .with_variant("compact pool",
                          [run](const Tensors& in) {
                            return Tensors{run(in.at(0), /*compact=*/true)};
                          })
            .on_first());
    channels = next;
  }
  built.stages.push_back(
      make_stage("pool", [](const Tensor& x) {
        return torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1);
      }).on_first());
  add_classifier(built, "head", Linear(channels, options.classes));
  return built;
}

BuiltModel build_cnn_profile(const std::string& name,
                             const ModelOptions& options) {
  check_image_size(name, options, options.image_size % 2 == 0, "even ones");
  BuiltModel built;
  constexpr int64_t kFilters[] = {10, 20, 40, 60, 40, 40, 40, 40, 40, 20, 20};
  constexpr size_t kLast = std::size(kFilters) - 1;
  int64_t channels = options.channels;
  for (size_t i = 0; i <= kLast; ++i) {
    const std::string number = std::to_string(i);
    auto conv = built.root->register_module(
        "conv" + number,
        Conv2d(Conv2dOptions(channels, kFilters[i], 5).padding(2)));
    built.stages.push_back(make_stage("conv" + number,
                                      [conv](const Tensor& x) mutable {
                                        return relu_inplace(conv->forward(x));
                                      },
                                      {conv})
                               .of_kind("conv")
                               .on_first());
    // A 1×1 pool is a copy. LibTorch's pool would save an 8-byte index per pixel for its
    // backward, which the original does not.
    const std::string pool = "pool" + number;
    built.stages.push_back(
        i < kLast
            ? make_stage(pool, [](const Tensor& x) { return x.clone(); })
                  .of_kind("copy")
                  .on_first()
            : make_stage(
                  pool, [](const Tensor& x) { return torch::max_pool2d(x, 2); })
                  .with_variant("compact pool",
                                [](const Tensors& in) {
                                  return Tensors{ops::max_pool2d(in.at(0))};
                                })
                  .on_first());
    channels = kFilters[i];
  }
  built.stages.push_back(make_stage("flatten", [](const Tensor& x) {
                           return x.flatten(1);
                         }).on_first());
  const int64_t side = options.image_size / 2;
  add_hidden_layer(built, "dense0", LoraLinear(channels * side * side, 32));
  add_classifier(built, "dense1", Linear(32, options.classes));
  return built;
}

}  // namespace

std::vector<ModelSpec> cnn_models() {
  ModelOptions basic = image_options(224, 1, 10);
  basic.norm = "batch";
  ModelOptions blocks = image_options(112, 1, 10, 16);
  blocks.depth = 5;
  return {
      {"cnn-basic", "convolutions that halve the image, 28 to 3584 pixels",
       Task::kImages, basic, build_cnn_basic},
      {"cnn-blocks", "blocks of convolution, norm, ReLU and pool",
       Task::kImages, blocks, build_cnn_blocks},
      {"cnn-profile", "11 convolutions and pools at nearly one size",
       Task::kImages, image_options(256, 1, 10), build_cnn_profile},
  };
}

}  // namespace reprise::detail
