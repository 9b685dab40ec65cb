// Tested by tests/models/values_test.cpp.
#include "models/loss.h"
#include "models/transformer.h"

#include <reprise/ops/norm.h>

#include <torch/nn.h>

namespace reprise::detail {
namespace {

using torch::Tensor;
using torch::nn::Conv2d;
using torch::nn::LayerNorm;

constexpr double kVitEpsilon = 1e-12;
constexpr int64_t kPatch = 16;

// The original draws from a normal distribution truncated at ±2, which is a hundred
// deviations: normal_init() is equivalent.

int64_t patch_count(const ModelOptions& options) {
  const int64_t side = options.image_size / kPatch;
  return side * side;
}

class VitEmbeddingsImpl : public torch::nn::Module {
 public:
  explicit VitEmbeddingsImpl(const ModelOptions& options)
      : dropout_(options.dropout),
        cls_token_(register_parameter("cls_token",
                                      torch::empty({1, 1, options.width}))),
        positions_(register_parameter(
            "position_embeddings",
            torch::empty({1, patch_count(options) + 1, options.width}))) {
    const auto conv =
        torch::nn::Conv2dOptions(options.channels, options.width, kPatch)
            .stride(kPatch);
    patches_ = add_container(*this, "patch_embeddings")
                   ->register_module("projection", Conv2d(conv));
    normal_init(cls_token_, kWeightDeviation);
    normal_init(positions_, kWeightDeviation);
    normal_init(patches_->weight, kWeightDeviation);
    zero_init(patches_->bias);
  }

  Tensor forward(const Tensor& images) {  // (N, C, S, S) → (N, T, width)
    const Tensor patches = patches_->forward(images).flatten(2).transpose(1, 2);
    const Tensor first = cls_token_.expand({images.size(0), -1, -1});
    return torch::dropout(torch::cat({first, patches}, 1) + positions_,
                          dropout_, is_training());
  }

 private:
  double dropout_;
  Tensor cls_token_, positions_;
  Conv2d patches_{nullptr};
};
TORCH_MODULE(VitEmbeddings);

class VitLayerImpl : public torch::nn::Module {
 public:
  explicit VitLayerImpl(const ModelOptions& options)
      : dropout_(options.dropout) {
    const int64_t width = options.width;
    const auto attention = add_container(*this, "attention");
    self_ = attention->register_module(
        "attention", SelfAttention(width, options.heads, options.dropout));
    mixed_ = add_container(*attention, "output")
                 ->register_module("dense", make_linear(width, width));
    up_ = add_container(*this, "intermediate")
              ->register_module("dense", make_linear(width, 4 * width));
    down_ = add_container(*this, "output")
                ->register_module("dense", make_linear(4 * width, width));
    before_ = register_module("layernorm_before",
                              make_layer_norm(width, kVitEpsilon));
    after_ =
        register_module("layernorm_after", make_layer_norm(width, kVitEpsilon));
  }

  Tensor forward(const Tensor& x,
                 RecomputeChoice recompute = {}) {  // (N, T, C)
    const NormedInput first(x, {}, add_norm_with(before_), recompute);
    const Tensor attended = attend(first, recompute);
    return feed({first.stream(), attended, add_norm_with(after_), recompute},
                recompute);
  }

 private:
  Tensor attend(const NormedInput& input, RecomputeChoice recompute) {
    const Tensors heads = input.feed([this](const Tensors& in) {
      const auto [q, k, v] = self_->project(in[0]);
      return Tensors{q, k, v};
    });
    const Tensor mixed = checkpoint_if(
        recompute.attention,
        [this](const Tensor& a, const Tensor& b, const Tensor& c) {
          return run_linear(mixed_, self_->attend(a, b, c));
        },
        heads[0], heads[1], heads[2]);
    return drop(mixed, recompute);
  }

  /// The stream plus the feed-forward layer of its norm.
  Tensor feed(const NormedInput& input, RecomputeChoice recompute) {
    const FeedForward feed =
        make_feed_forward(up_, down_, ops::Activation::kGelu);
    const Tensor up = input.feed(
        [feed](const Tensors& in) { return Tensors{run_up(feed, in[0])}; })[0];
    return add_feed_forward(feed, input.stream(), up,
                            is_training() ? dropout_ : 0, recompute);
  }

  Tensor drop(const Tensor& x, RecomputeChoice recompute) {
    return drop_out(x, dropout_, is_training(), recompute);
  }

  double dropout_;
  SelfAttention self_{nullptr};
  LoraLinear mixed_{nullptr}, up_{nullptr}, down_{nullptr};
  LayerNorm before_{nullptr}, after_{nullptr};
};
TORCH_MODULE(VitLayer);

BuiltModel build_vit(const std::string& name, const ModelOptions& options) {
  check_image_size(name, options, options.image_size % kPatch == 0,
                   "multiples of 16");
  BuiltModel built;
  const auto body = add_container(*built.root, "vit");
  const auto embeddings =
      body->register_module("embeddings", VitEmbeddings(options));
  built.stages.push_back(make_stage("embed", embeddings).on_first());

  const auto list = add_container(*add_container(*body, "encoder"), "layer");
  for (int64_t i = 0; i < options.depth; ++i) {
    const std::string number = std::to_string(i);
    const auto layer = list->register_module(number, VitLayer(options));
    built.stages.push_back(make_block_stage("layer." + number, layer));
  }
  const auto norm = body->register_module(
      "layernorm", make_layer_norm(options.width, kVitEpsilon));
  built.stages.push_back(make_stage("layernorm", norm).on_first());

  auto classifier = built.root->register_module(
      "classifier", make_head(options.width, options.classes));
  built.stages.push_back(make_stage("head",
                                    [classifier](const Tensor& x) mutable {
                                      return run_linear(classifier,
                                                        x.select(1, 0));
                                    },
                                    {classifier})
                             .on_first());
  const auto loss = built.root->register_module("loss", Loss(Task::kImages));
  built.stages.push_back(make_stage("loss", loss));
  built.packed_groups = self_attention_groups(built.root);
  return built;
}

ModelOptions vit_options(int64_t depth, int64_t width) {
  ModelOptions options = transformer_options(depth, width, 0.0);
  options.image_size = 224;
  options.channels = 3;
  options.classes = 1000;
  return options;
}

}  // namespace

std::vector<ModelSpec> vit_models() {
  const WeightNames weights{.body_prefix = "vit.",
                            .head_prefix = "classifier.",
                            .foreign_prefixes = {"pooler.", "vit.pooler."}};
  return {
      {"vit-b-16", "image classification by patches, 86.6M", Task::kImages,
       vit_options(12, 768), build_vit, weights},
      {"vit-l-16", "image classification by patches, 304M", Task::kImages,
       vit_options(24, 1024), build_vit, weights},
  };
}

}  // namespace reprise::detail
