// Tested by tests/models/values_test.cpp.
#include "compat/autocast.h"
#include "models/transformer.h"

#include <reprise/ops/embedding.h>
#include <reprise/ops/norm.h>

#include <torch/nn.h>

#include <cmath>
#include <utility>

namespace reprise::detail {
namespace {

using torch::Tensor;
using torch::nn::Embedding;
using torch::nn::LayerNorm;

constexpr double kGpt2Epsilon = 1e-5;

/// A linear layer with a weight (in, out), as in the original.
class Conv1DImpl : public torch::nn::Module, public LoraLayer {
 public:
  Conv1DImpl(int64_t from, int64_t to, double deviation = kWeightDeviation)
      : weight_(register_parameter("weight", torch::empty({from, to}))),
        bias_(register_parameter("bias", torch::zeros({to}))) {
    normal_init(weight_, deviation);
  }

  Tensor forward(const Tensor& x) {  // (N, T, in)
    return add_adapter(x, ops::linear(x, weight_, bias_, weight_layout()));
  }
  Tensor adapted_weight() const override { return weight_; }
  ops::WeightLayout weight_layout() const override {
    return ops::WeightLayout::kInOut;
  }

  const Tensor& weight() const { return weight_; }
  const Tensor& bias() const { return bias_; }

 private:
  Tensor weight_, bias_;
};
TORCH_MODULE(Conv1D);

class Gpt2AttentionImpl : public torch::nn::Module {
 public:
  Gpt2AttentionImpl(const ModelOptions& options, double out_deviation)
      : heads_(options.heads),
        dropout_(options.dropout),
        c_attn_(register_module("c_attn",
                                Conv1D(options.width, 3 * options.width))),
        c_proj_(register_module(
            "c_proj", Conv1D(options.width, options.width, out_deviation))) {}

  /// `more`: {mask} of the segments, or nothing.
  Tensor forward(const NormedInput& input, RecomputeChoice recompute,
                 const Tensors& more) {
    const Tensor projected =
        input.feed([layer = c_attn_](const Tensors& in) mutable {
          return Tensors{layer(in[0])};
        })[0];
    const auto [q, k, v] = ops::split_heads(projected, heads_, heads_);
    const auto mix = [this](const Tensor& a, const Tensor& b, const Tensor& c,
                            const auto&... mask) {
      MultiHeadOptions options;
      options.causal = true;
      if constexpr (sizeof...(mask) > 0) options.mask = (mask, ...);
      options.dropout = is_training() ? dropout_ : 0;
      return c_proj_(multi_head_attention(a, b, c, options));
    };
    const Tensor mixed =
        more.empty()
            ? checkpoint_if(recompute.attention, mix, q, k, v)
            : checkpoint_if(recompute.attention, mix, q, k, v, more[0]);
    return drop_out(mixed, dropout_, is_training(), recompute);
  }

 private:
  int64_t heads_;
  double dropout_;
  Conv1D c_attn_, c_proj_;
};
TORCH_MODULE(Gpt2Attention);

class Gpt2FeedForwardImpl : public torch::nn::Module {
 public:
  Gpt2FeedForwardImpl(const ModelOptions& options, double out_deviation)
      : dropout_(options.dropout),
        c_fc_(
            register_module("c_fc", Conv1D(options.width, 4 * options.width))),
        c_proj_(register_module(
            "c_proj",
            Conv1D(4 * options.width, options.width, out_deviation))) {}

  /// The stream plus the feed-forward layer of its norm.
  Tensor forward(const NormedInput& input, RecomputeChoice recompute) {
    const FeedForward feed = layers();
    const Tensor up = input.feed(
        [feed](const Tensors& in) { return Tensors{run_up(feed, in[0])}; })[0];
    return add_feed_forward(feed, input.stream(), up,
                            is_training() ? dropout_ : 0, recompute);
  }

 private:
  FeedForward layers() {
    FeedForward made;
    made.activation = ops::Activation::kGeluTanh;
    if (!c_fc_->has_adapter() && !c_proj_->has_adapter()) {
      made.layers = {c_fc_->weight(), c_fc_->bias(), c_proj_->weight(),
                     c_proj_->bias(), c_fc_->weight_layout()};
    }
    made.up = [layer = c_fc_](const Tensor& t) mutable { return layer(t); };
    made.down = [layer = c_proj_](const Tensor& t) mutable { return layer(t); };
    return made;
  }

  double dropout_;
  Conv1D c_fc_, c_proj_;
};
TORCH_MODULE(Gpt2FeedForward);

class Gpt2BlockImpl : public torch::nn::Module {
 public:
  /// The initial weights of layers that add to the residual stream are divided by the
  /// square root of the number of such layers.
  explicit Gpt2BlockImpl(const ModelOptions& options)
      : Gpt2BlockImpl(options,
                      kWeightDeviation /
                          std::sqrt(2 * static_cast<double>(options.depth))) {}

  Tensor forward(const Tensor& x, RecomputeChoice recompute,
                 const Tensors& more) {
    const NormedInput first(x, {}, add_norm_with(ln_1_), recompute);
    const Tensor attended = attn_->forward(first, recompute, more);
    const NormedInput second(first.stream(), attended, add_norm_with(ln_2_),
                             recompute);
    return mlp_->forward(second, recompute);
  }

 private:
  Gpt2BlockImpl(const ModelOptions& options, double out_deviation)
      : ln_1_(register_module("ln_1",
                              make_layer_norm(options.width, kGpt2Epsilon))),
        attn_(register_module("attn", Gpt2Attention(options, out_deviation))),
        ln_2_(register_module("ln_2",
                              make_layer_norm(options.width, kGpt2Epsilon))),
        mlp_(register_module("mlp", Gpt2FeedForward(options, out_deviation))) {}

  LayerNorm ln_1_;
  Gpt2Attention attn_;
  LayerNorm ln_2_;
  Gpt2FeedForward mlp_;
};
TORCH_MODULE(Gpt2Block);

BuiltModel build_gpt2(const std::string& name, const ModelOptions& options) {
  BuiltModel built;
  const auto body = add_container(*built.root, "transformer");
  auto wte = body->register_module(
      "wte", make_embedding(options.vocab, options.width));
  auto wpe =
      body->register_module("wpe", make_embedding(options.seq, options.width));
  built.stages.push_back(make_stage(
      "embed",
      [name, options, wte, wpe](const Tensors& batch) mutable {
        check_tokens(name, options, batch);
        const Tensor& tokens = batch[0];
        const Tensor positions =
            has_segments(batch)
                ? ops::embedding(wpe, segment_positions(batch[2]))
                : wpe->weight.narrow(0, 0, tokens.size(1));
        Tensors outputs = batch;
        outputs[0] = torch::dropout(ops::embedding(wte, tokens) + positions,
                                    options.dropout, wte->is_training());
        if (has_segments(batch)) {
          outputs[2] =
              segment_mask(batch[2], compat::autocast_type(outputs[0]));
        }
        return outputs;
      },
      {wte, wpe}));

  const auto list = add_container(*body, "h");
  for (int64_t i = 0; i < options.depth; ++i) {
    const std::string number = std::to_string(i);
    const auto block = list->register_module(number, Gpt2Block(options));
    built.stages.push_back(make_language_block_stage("h." + number, block));
  }
  const auto norm = body->register_module(
      "ln_f", make_layer_norm(options.width, kGpt2Epsilon));
  built.stages.push_back(
      make_stage("ln_f",
                 [norm](const Tensor& x) {
                   return ops::add_norm(x, {}, norm).normalized;
                 },
                 {norm})
          .on_first());

  // The weight of the output layer is that of the embedding.
  add_language_head(built, wte, [wte] { return wte->weight; });
  built.linear_parameters = [root = built.root, wte] {
    std::vector<Tensor> found = {wte->weight};
    for (const auto& module : root->modules(/*include_self=*/false)) {
      if (const auto* layer = module->as<Conv1D>()) {
        found.push_back(layer->weight());
        found.push_back(layer->bias());
      }
    }
    return found;
  };
  return built;
}

ModelOptions gpt2_options(int64_t depth, int64_t width) {
  ModelOptions options = transformer_options(depth, width, 0.1);
  options.vocab = 50257;
  options.seq = 1024;
  return options;
}

}  // namespace

std::vector<ModelSpec> gpt2_models() {
  const WeightNames weights{
      .body_prefix = "transformer.",
      .head_prefix = "",
      .tied = {{"lm_head.weight", "transformer.wte.weight"}}};
  return {
      {"gpt2", "language model, 124M", Task::kLanguage, gpt2_options(12, 768),
       build_gpt2, weights},
      {"gpt2-medium", "language model, 355M", Task::kLanguage,
       gpt2_options(24, 1024), build_gpt2, weights},
      {"gpt2-large", "language model, 774M", Task::kLanguage,
       gpt2_options(36, 1280), build_gpt2, weights},
      {"gpt2-xl", "language model, 1558M", Task::kLanguage,
       gpt2_options(48, 1600), build_gpt2, weights},
  };
}

}  // namespace reprise::detail
