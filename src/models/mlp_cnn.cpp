#include "models/batch_norm.h"
#include "models/family.h"
#include "models/loss.h"

#include <reprise/ops/max_pool.h>
#include <reprise/ops/norm_relu.h>

#include <torch/nn.h>

#include <algorithm>
#include <functional>

namespace reprise::detail {
namespace {

using torch::Tensor;
using torch::nn::Conv2d;
using torch::nn::Conv2dOptions;
using torch::nn::Linear;
using torch::nn::Module;

/// The end that all classifiers of images share.
void add_head(Built& built, const std::string& name, Linear head) {
  built.root->register_module(name, head);
  built.stages.push_back(make_stage(name, head).on_first());
  const auto loss = built.root->register_module("loss", Loss(Task::kImages));
  built.stages.push_back(make_stage("loss", loss));
}

/// flatten → linear → ReLU → dropout
void add_hidden(Built& built, const std::string& name, Linear linear,
                double dropout = 0) {
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

}  // namespace

Built build_mlp(const std::string&, const ModelOptions& options) {
  Built built{std::make_shared<Module>(), {}};
  int64_t from = options.channels * options.image_size * options.image_size;
  for (int64_t i = 0; i < options.depth; ++i) {
    Linear linear(from, options.width);
    // For ReLU (He et al. 2015). LibTorch's default divides the variance of activations
    // and gradients by six per layer: those of a deep chain become denormal numbers.
    torch::nn::init::kaiming_uniform_(linear->weight, /*a=*/0, torch::kFanIn,
                                      torch::kReLU);
    torch::nn::init::zeros_(linear->bias);
    add_hidden(built, "hidden" + std::to_string(i), linear, options.dropout);
    from = options.width;
  }
  add_head(built, "head", Linear(from, options.classes));
  return built;
}

Built build_cnn_basic(const std::string& name, const ModelOptions& options) {
  // A convolution with `next` channels is where images of `side` enter.
  struct Step {
    int64_t next, side;
  };
  static constexpr Step kSteps[] = {{8, 3584}, {16, 1792}, {24, 896}, {32, 448},
                                    {40, 224}, {48, 112},  {56, 56},  {64, 28},
                                    {72, 0},   {80, 0},    {88, 0},   {96, 0}};
  Built built{std::make_shared<Module>(), {}};
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
      const BatchNorm2d batch(next);
      part->register_module("norm", batch);
      norm_relu = [batch](const Tensor& x) { return lean_norm_relu(batch, x); };
    } else {
      const torch::nn::GroupNorm group(
          torch::nn::GroupNormOptions(next / 8, next));
      part->register_module("norm", group);
      norm_relu = [group](const Tensor& x) { return lean_norm_relu(group, x); };
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
  add_hidden(built, "hidden", Linear(channels, 32));
  add_head(built, "head", Linear(32, options.classes));
  return built;
}

Built build_cnn_blocks(const std::string& name, const ModelOptions& options) {
  check_image_size(name, options,
                   options.image_size >= int64_t{1} << options.depth,
                   "those that can be halved once a block");
  Built built{std::make_shared<Module>(), {}};
  int64_t channels = options.channels;
  for (int64_t i = 0; i < options.depth; ++i) {
    // Doubled twice, then the same.
    const int64_t next = options.width << std::min<int64_t>(i, 2);
    const bool first = i == 0;
    const std::string block = "block" + std::to_string(i);
    const auto part = add_container(*built.root, block);
    auto conv = part->register_module(
        "conv", Conv2d(Conv2dOptions(channels, next, 3).padding(1)));
    auto norm = part->register_module("norm", BatchNorm2d(next));
    built.stages.push_back(
        make_stage(block,
                   [conv, norm, first](const Tensor& x) {
                     return lean_norm_relu(norm, run_conv(conv, x, first),
                                           AfterNorm::kReluMaxPool);
                   },
                   {part})
            .with_variant("lean pool",
                          [conv, norm, first](const Tensors& in) {
                            return Tensors{lean_norm_relu(
                                norm, run_conv(conv, in.at(0), first),
                                AfterNorm::kReluLeanMaxPool)};
                          })
            .on_first());
    channels = next;
  }
  built.stages.push_back(
      make_stage("pool", [](const Tensor& x) {
        return torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1);
      }).on_first());
  add_head(built, "head", Linear(channels, options.classes));
  return built;
}

Built build_cnn_profile(const std::string& name, const ModelOptions& options) {
  check_image_size(name, options, options.image_size % 2 == 0, "even ones");
  Built built{std::make_shared<Module>(), {}};
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
    // A pool of 1×1 is a copy. LibTorch's own would keep an index of 8 bytes a
    // pixel for its backward, which the original does not.
    const std::string pool = "pool" + number;
    built.stages.push_back(
        i < kLast
            ? make_stage(pool, [](const Tensor& x) { return x.clone(); })
                  .of_kind("copy")
                  .on_first()
            : make_stage(
                  pool, [](const Tensor& x) { return torch::max_pool2d(x, 2); })
                  .with_variant("lean pool",
                                [](const Tensors& in) {
                                  return Tensors{lean_max_pool2d(in.at(0))};
                                })
                  .on_first());
    channels = kFilters[i];
  }
  built.stages.push_back(make_stage("flatten", [](const Tensor& x) {
                           return x.flatten(1);
                         }).on_first());
  const int64_t side = options.image_size / 2;
  add_hidden(built, "dense0", Linear(channels * side * side, 32));
  add_head(built, "dense1", Linear(32, options.classes));
  return built;
}

}  // namespace reprise::detail
