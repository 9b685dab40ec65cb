// Tested by tests/models/values_test.cpp.
#include "models/layers.h"
#include "models/loss.h"

#include <reprise/ops/norm.h>

#include <torch/nn.h>

#include <array>

namespace reprise::detail {
namespace {

using torch::Tensor;
using torch::nn::Conv2d;
using torch::nn::Conv2dOptions;

Conv2d make_conv(int64_t from, int64_t to, int64_t kernel, int64_t stride) {
  Conv2d conv(Conv2dOptions(from, to, kernel)
                  .stride(stride)
                  .padding(kernel / 2)
                  .bias(false));
  torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut,
                                   torch::kReLU);
  return conv;
}

/// A residual block: convolutions, each with a norm, and ReLUs between them. The input,
/// through `downsample` if its shape differs, is added before the last ReLU.
class ResNetBlockImpl : public torch::nn::Module {
 public:
  struct Layer {
    int64_t to, kernel, stride;
  };

  ResNetBlockImpl(int64_t from, const std::vector<Layer>& layers) {
    int64_t channels = from;
    int64_t stride = 1;
    for (const Layer& layer : layers) {
      const std::string number = std::to_string(convs_.size() + 1);
      convs_.push_back(register_module(
          "conv" + number,
          make_conv(channels, layer.to, layer.kernel, layer.stride)));
      norms_.push_back(
          register_module("bn" + number, SyncBatchNorm2d(layer.to)));
      channels = layer.to;
      stride *= layer.stride;
    }
    if (stride != 1 || channels != from) {
      downsample_ = register_module(
          "downsample",
          torch::nn::Sequential(make_conv(from, channels, 1, stride),
                                SyncBatchNorm2d(channels)));
    }
  }

  /// `recompute_norms`: recompute the input of each convolution, a norm and a ReLU of the
  /// preceding convolution's output, instead of saving it.
  Tensor forward(const Tensor& x, bool recompute_norms = false) {
    Tensor y = convs_[0](x);
    for (size_t i = 1; i < convs_.size(); ++i) {
      y = checkpoint_if(
          recompute_norms,
          [this, i](const Tensor& t) {
            return convs_[i](ops::norm_act(norms_[i - 1], t));
          },
          y);
    }
    return ops::norm_act(
        norms_.back(), y,
        {.residual = downsample_.is_empty() ? x : shortcut(x)});
  }

 private:
  /// In oneDNN 2.6 (LibTorch 1.13) the backward of a strided 1 × 1 convolution writes past
  /// the end of a buffer if the layout is channels-last and the number of channels is not a
  /// multiple of the vector size. Such a convolution reads only every stride-th position, so
  /// these are selected first and the convolution has stride 1.
  Tensor shortcut(const Tensor& x) {
    const Conv2d conv(downsample_->ptr<torch::nn::Conv2dImpl>(0));
    const SyncBatchNorm2d norm(downsample_->ptr<SyncBatchNorm2dImpl>(1));
    const ops::NormActOptions only_norm{.activation =
                                            ops::NormActivation::kNone};
    const int64_t stride = conv->options.stride()->at(0);
    if (stride == 1 || !x.device().is_cpu() ||
        x.suggest_memory_format() != at::MemoryFormat::ChannelsLast) {
      return ops::norm_act(norm, run_conv(conv, x, /*first=*/false), only_norm);
    }
    const auto every = [stride](const Tensor& t, int64_t dim) {
      return t.slice(dim, 0, t.size(dim), stride);
    };
    const Tensor y = torch::conv2d(every(every(x, 2), 3), conv->weight);
    return ops::norm_act(norm, y, only_norm);
  }

  std::vector<Conv2d> convs_;
  std::vector<SyncBatchNorm2d> norms_;
  torch::nn::Sequential downsample_{nullptr};
};
TORCH_MODULE(ResNetBlock);

enum class Kind { kBasic, kBottleneck };

BuiltModel build_resnet(const ModelOptions& options, Kind kind,
                        const std::array<int, 4>& counts) {
  BuiltModel built;
  auto& root = *built.root;
  int64_t planes = options.width;
  auto conv =
      root.register_module("conv1", make_conv(options.channels, planes, 7, 2));
  auto norm = root.register_module("bn1", SyncBatchNorm2d(planes));
  const auto stem = [conv, norm](const Tensor& x, bool compact) {
    const ops::MaxPoolOptions pool{.kernel = 3, .stride = 2, .padding = 1};
    return ops::norm_act(norm, run_conv(conv, x, /*first=*/false),
                         {.pool = pool, .compact_pool = compact});
  };
  built.stages.push_back(
      make_stage("stem",
                 [stem](const Tensor& x) { return stem(x, /*compact=*/false); },
                 {conv, norm})
          .with_variant("compact pool",
                        [stem](const Tensors& in) {
                          return Tensors{stem(in.at(0), /*compact=*/true)};
                        })
          .on_first());

  int64_t channels = planes;
  for (size_t layer = 0; layer < counts.size(); ++layer, planes *= 2) {
    const std::string name = "layer" + std::to_string(layer + 1);
    const auto list = add_container(root, name);
    for (int i = 0; i < counts[layer]; ++i) {
      const int64_t stride = layer > 0 && i == 0 ? 2 : 1;
      const int64_t to = kind == Kind::kBasic ? planes : 4 * planes;
      const auto layers =
          kind == Kind::kBasic
              ? std::vector<ResNetBlockImpl::Layer>{{planes, 3, stride},
                                                    {planes, 3, 1}}
              : std::vector<ResNetBlockImpl::Layer>{
                    {planes, 1, 1}, {planes, 3, stride}, {to, 1, 1}};
      const auto number = std::to_string(i);
      const auto block =
          list->register_module(number, ResNetBlock(channels, layers));
      built.stages.push_back(
          make_stage(name + "." + number, block)
              .with_variant("recompute norms",
                            [block](const Tensors& in) mutable {
                              return Tensors{block->forward(
                                  in.at(0), /*recompute_norms=*/true)};
                            })
              .of_kind("block")
              .on_first());
      channels = to;
    }
  }

  auto fc =
      root.register_module("fc", torch::nn::Linear(channels, options.classes));
  built.stages.push_back(
      make_stage("fc",
                 [fc](const Tensor& x) mutable {  // (N, C, h, w)
                   return run_linear(fc, x.mean({2, 3}));
                 },
                 {fc})
          .on_first());
  const auto loss = root.register_module("loss", Loss(Task::kImages));
  built.stages.push_back(make_stage("loss", loss));
  return built;
}

BuiltModel build_resnet18(const std::string&, const ModelOptions& options) {
  return build_resnet(options, Kind::kBasic, {2, 2, 2, 2});
}

BuiltModel build_resnet50(const std::string&, const ModelOptions& options) {
  return build_resnet(options, Kind::kBottleneck, {3, 4, 6, 3});
}

BuiltModel build_resnet101(const std::string&, const ModelOptions& options) {
  return build_resnet(options, Kind::kBottleneck, {3, 4, 23, 3});
}

}  // namespace

std::vector<ModelSpec> resnet_models() {
  const ModelOptions options = image_options(224, 3, 1000, 64);
  const WeightNames weights{.head_prefix = "fc."};
  return {
      {"resnet18", "torchvision's resnet18, 11.7M", Task::kImages, options,
       build_resnet18, weights},
      {"resnet50", "torchvision's resnet50, 25.6M", Task::kImages, options,
       build_resnet50, weights},
      {"resnet101", "torchvision's resnet101, 44.5M", Task::kImages, options,
       build_resnet101, weights},
  };
}

}  // namespace reprise::detail
