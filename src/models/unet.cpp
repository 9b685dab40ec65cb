// Tested by tests/models/zoo_test.cpp.
#include "models/layers.h"
#include "models/loss.h"

#include <reprise/ops/concat.h>
#include <reprise/ops/norm.h>
#include <reprise/ops/pool.h>

#include <torch/nn.h>

namespace reprise::detail {
namespace {

using torch::Tensor;
using torch::nn::Conv2d;
using torch::nn::Conv2dOptions;
using torch::nn::ConvTranspose2d;

/// Convolution 3×3, norm, ReLU.
class ConvBlockImpl : public torch::nn::Module {
 public:
  ConvBlockImpl(int64_t from, int64_t to, bool first = false)
      : first_(first),
        conv_(register_module(
            "conv", Conv2d(Conv2dOptions(from, to, 3).padding(1).bias(false)))),
        norm_(register_module("norm", SyncBatchNorm2d(to))) {
    torch::nn::init::kaiming_normal_(conv_->weight, 0, torch::kFanIn,
                                     torch::kReLU);
  }

  Tensor forward(const Tensor& x) {
    return ops::norm_act(norm_, run_conv(conv_, x, first_));
  }

 private:
  bool first_;  // layer of the network
  Conv2d conv_;
  SyncBatchNorm2d norm_;
};
TORCH_MODULE(ConvBlock);

/// The skip tensor and the enlarged image. On a GPU, the layer's bias is added while they are
/// joined; on the CPU, oneDNN adds it.
Tensor join(const Tensor& skip, ConvTranspose2d enlarge, const Tensor& x) {
  if (!x.is_cuda()) {
    return ops::concat_channels(skip, enlarge->forward(x));
  }
  return ops::concat_channels(
      skip, torch::conv_transpose2d(x, enlarge->weight, {}, /*stride=*/2),
      enlarge->bias);
}

// Stages pass on the image, the targets, and the skip tensors that are open, the deepest
// last.
BuiltModel build_unet(const std::string& name, const ModelOptions& options) {
  const int64_t depth = options.depth;
  TORCH_CHECK(depth <= 16, "[model ", name, "] expected a depth up to 16, got ",
              depth);
  const int64_t divisor = int64_t{1} << depth;
  check_image_size(name, options, options.image_size % divisor == 0,
                   "multiples of " + std::to_string(divisor));
  BuiltModel built;
  const auto add_block = [&](const ModulePtr& level, const std::string& stage,
                             const char* block, int64_t from, int64_t to) {
    built.stages.push_back(
        make_stage(stage + "." + block,
                   level->register_module(
                       block, ConvBlock(from, to, built.stages.empty())))
            .on_first());
  };

  int64_t channels = options.channels;
  int64_t width = options.width;
  for (int64_t i = 0; i < depth; ++i, width *= 2) {
    const std::string stage = "down" + std::to_string(i);
    const auto level = add_container(*built.root, stage);
    add_block(level, stage, "first", channels, width);
    auto second = level->register_module("second", ConvBlock(width, width));
    const auto with_pool = [second](auto pool) -> Stage::Function {
      return [second, pool](const Tensors& in) mutable {
        Tensors out = in;
        out.push_back(second->forward(in[0]));
        out[0] = pool(out.back());
        return out;
      };
    };
    built.stages.push_back(
        Stage(stage + ".second", with_pool([](const Tensor& x) {
                ops::MaxPoolOptions fastest;
                fastest.compact = false;
                return ops::max_pool2d(x, fastest);
              }),
              {second})
            .with_variant("compact pool", with_pool([](const Tensor& x) {
                            return ops::max_pool2d(x);
                          })));
    channels = width;
  }

  const auto bottom = add_container(*built.root, "bottom");
  add_block(bottom, "bottom", "first", channels, width);
  add_block(bottom, "bottom", "second", width, width);

  for (int64_t i = depth - 1; i >= 0; --i) {
    const std::string stage = "up" + std::to_string(i);
    const auto level = add_container(*built.root, stage);
    const int64_t next = width / 2;
    auto enlarge = level->register_module(
        "enlarge",
        ConvTranspose2d(
            torch::nn::ConvTranspose2dOptions(width, next, 2).stride(2)));
    auto first = level->register_module("first", ConvBlock(2 * next, next));
    built.stages.push_back(
        make_stage(stage + ".first",
                   [enlarge, first](const Tensors& in) mutable {
                     Tensors out(in.begin(), in.end() - 1);
                     out[0] = first->forward(join(in.back(), enlarge, in[0]));
                     return out;
                   },
                   {enlarge, first}));
    add_block(level, stage, "second", next, next);
    width = next;
  }

  const auto head = built.root->register_module(
      "head", Conv2d(Conv2dOptions(width, options.classes, 1)));
  built.stages.push_back(make_stage("head", head).on_first());
  const auto loss = built.root->register_module("loss", Loss(Task::kPixels));
  built.stages.push_back(make_stage("loss", loss));
  return built;
}

}  // namespace

std::vector<ModelSpec> unet_models() {
  ModelOptions options = image_options(128, 1, 11, 64);
  options.depth = 4;
  return {{"unet", "a class per pixel, skip connections across stages",
           Task::kPixels, options, build_unet}};
}

}  // namespace reprise::detail
