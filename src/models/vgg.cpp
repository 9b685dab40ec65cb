// Tested by tests/models/zoo_test.cpp.
#include "models/layers.h"
#include "models/loss.h"

#include <reprise/ops/conv.h>

#include <torch/nn.h>

namespace reprise::detail {
namespace {

using torch::Tensor;
using torch::nn::Conv2d;
using torch::nn::Linear;

Conv2d make_conv(int64_t from, int64_t to) {
  Conv2d conv(torch::nn::Conv2dOptions(from, to, 3).padding(1));
  torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut,
                                   torch::kReLU);
  zero_init(conv->bias);
  return conv;
}

template <class Layer>
Layer make_vgg_linear(int64_t from, int64_t to) {
  Layer linear(from, to);
  normal_init(linear->weight, 0.01);
  zero_init(linear->bias);
  return linear;
}

BuiltModel build_vgg16(const std::string& name, const ModelOptions& options) {
  check_image_size(name, options, options.image_size >= 32, "32 and more");
  BuiltModel built;
  const auto features = add_container(*built.root, "features");
  const auto classifier = add_container(*built.root, "classifier");
  const int64_t width = options.width;

  // Channels as multiples of the width; 0: the preceding convolution is followed by a pool.
  constexpr int kPlan[] = {1, 1, 0, 2, 2, 0, 4, 4, 4,
                           0, 8, 8, 8, 0, 8, 8, 8, 0};
  int64_t channels = options.channels;
  int layer = 0;  // index in the original's list of layers
  for (size_t i = 0; i < std::size(kPlan); ++i) {
    if (kPlan[i] == 0) {
      ++layer;
      continue;
    }
    const int64_t next = kPlan[i] * width;
    const std::string number = std::to_string(layer);
    auto conv = features->register_module(number, make_conv(channels, next));
    const bool first = i == 0, pool = kPlan[i + 1] == 0;
    const auto run = [conv, first, pool](const Tensor& x, bool compact) {
      ops::ConvReluOptions options;
      if (pool) options.pool = ops::MaxPoolOptions{};
      options.compact_pool = compact;
      // The kernel for first layers is for planes.
      return first && x.is_contiguous() ? relu_inplace(ops::image_conv(conv, x))
                                        : ops::conv_relu(conv, x, options);
    };
    Stage stage = make_stage(
        "features." + number,
        [run](const Tensor& x) { return run(x, /*compact=*/false); }, {conv});
    if (pool) {
      stage = stage.with_variant("compact pool", [run](const Tensors& in) {
        return Tensors{run(in.at(0), /*compact=*/true)};
      });
    }
    built.stages.push_back(stage.on_first());
    channels = next;
    layer += 2;  // the convolution and its ReLU
  }

  const int64_t hidden = 64 * width;
  const double dropout = options.dropout;
  const auto add_hidden = [&](const std::string& number, int64_t from) {
    auto linear = classifier->register_module(
        number, make_vgg_linear<LoraLinear>(from, hidden));
    built.stages.push_back(
        make_stage("classifier." + number,
                   [linear, dropout](const Tensor& x) mutable {
                     const Tensor flat =
                         x.dim() == 2
                             ? x
                             : torch::adaptive_avg_pool2d(x, {7, 7}).flatten(1);
                     return torch::dropout(
                         relu_inplace(run_linear(linear, flat)), dropout,
                         linear->is_training());
                   },
                   {linear})
            .on_first());
  };
  add_hidden("0", channels * 7 * 7);
  add_hidden("3", hidden);
  auto head = classifier->register_module(
      "6", make_vgg_linear<Linear>(hidden, options.classes));
  built.stages.push_back(make_linear_stage("classifier.6", head));
  const auto loss = built.root->register_module("loss", Loss(Task::kImages));
  built.stages.push_back(make_stage("loss", loss));
  return built;
}

}  // namespace

std::vector<ModelSpec> vgg_models() {
  ModelOptions options = image_options(224, 3, 1000, 64);
  options.dropout = 0.5;
  return {{"vgg16",
           "torchvision's vgg16, 138M parameters",
           Task::kImages,
           options,
           build_vgg16,
           {.head_prefix = "classifier.6."}}};
}

}  // namespace reprise::detail
