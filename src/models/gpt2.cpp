#include "compat/autocast.h"
#include "models/loss.h"
#include "models/transformer.h"

#include <reprise/ops/add_norm.h>
#include <reprise/ops/embedding.h>

#include <torch/nn.h>

#include <cmath>
#include <utility>

namespace reprise::detail {
namespace {

using torch::Tensor;
using torch::nn::Embedding;
using torch::nn::LayerNorm;

constexpr double kGpt2Epsilon = 1e-5;

/// A linear layer whose weight is (in, out), as the original stores it.
class Conv1DImpl : public torch::nn::Module {
 public:
  Conv1DImpl(int64_t from, int64_t to, double deviation = kWeightDeviation)
      : weight_(register_parameter("weight", torch::empty({from, to}))),
        bias_(register_parameter("bias", torch::zeros({to}))) {
    normal_init(weight_, deviation);
  }

  Tensor forward(const Tensor& x) {  // (N, T, in)
    return lean_linear(x, weight_, bias_, WeightLayout::kInOut);
  }

  const Tensor& weight() const { return weight_; }
  const Tensor& bias() const { return bias_; }

 private:
  Tensor weight_, bias_;
};
TORCH_MODULE(Conv1D);

/// layer(normal); where that is undefined, layer(norm(x)), computed once more in the
/// backward.
Tensor run_on_normal(Conv1D layer, const Tensor& x, const Tensor& normal,
                     LayerNorm norm) {
  if (normal.defined()) return layer(normal);
  return checkpoint_if(
      true,
      [layer, norm](const Tensor& t) mutable {
        return layer(lean_add_norm(t, {}, norm).normal);
      },
      x);
}

class Gpt2AttentionImpl : public torch::nn::Module {
 public:
  Gpt2AttentionImpl(const ModelOptions& options, double out_deviation)
      : heads_(options.heads),
        dropout_(options.dropout),
        c_attn_(register_module("c_attn",
                                Conv1D(options.width, 3 * options.width))),
        c_proj_(register_module(
            "c_proj", Conv1D(options.width, options.width, out_deviation))) {}

  /// `normal`: x normalised; undefined: by `norm`, once more in the backward.
  Tensor forward(const Tensor& x, const Tensor& normal, const LayerNorm& norm,
                 RecomputeChoice again) {
    const auto parts = run_on_normal(c_attn_, x, normal, norm).chunk(3, -1);
    const Tensor mixed = checkpoint_if(
        again.attention,
        [this](const Tensor& q, const Tensor& k, const Tensor& v) {
          HeadsOptions options;
          options.heads = heads_;
          options.causal = true;
          options.dropout = is_training() ? dropout_ : 0;
          return c_proj_(attend_heads(q, k, v, options));
        },
        parts[0], parts[1], parts[2]);
    return drop_out(mixed, dropout_, is_training(), again);
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

  /// As Gpt2Attention's.
  Tensor forward(const Tensor& x, const Tensor& normal, const LayerNorm& norm,
                 RecomputeChoice again) {
    const Tensor up = run_on_normal(c_fc_, x, normal, norm);
    const Tensor down = checkpoint_if(
        again.pointwise,
        [this](const Tensor& t) { return c_proj_(torch::gelu(t, "tanh")); },
        up);
    return drop_out(down, dropout_, is_training(), again);
  }

 private:
  double dropout_;
  Conv1D c_fc_, c_proj_;
};
TORCH_MODULE(Gpt2FeedForward);

class Gpt2BlockImpl : public torch::nn::Module {
 public:
  /// Layers that add to the residual stream start smaller, by the square root
  /// of how many there are.
  explicit Gpt2BlockImpl(const ModelOptions& options)
      : Gpt2BlockImpl(options,
                      kWeightDeviation /
                          std::sqrt(2 * static_cast<double>(options.depth))) {}

  Tensor forward(const Tensor& x, RecomputeChoice again = {}) {
    if (again.pointwise) {
      const Tensor y = x + attn_->forward(x, {}, ln_1_, again);
      return y + mlp_->forward(y, {}, ln_2_, again);
    }
    const auto [stream, first] = lean_add_norm(x, {}, ln_1_);
    const Tensor attended = attn_->forward(stream, first, ln_1_, again);
    const auto [y, second] = lean_add_norm(stream, attended, ln_2_);
    return y + mlp_->forward(y, second, ln_2_, again);
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

Embedding make_embedding(int64_t count, int64_t width) {
  const Tensor weight = torch::empty({count, width});
  normal_init(weight, kWeightDeviation);
  return Embedding(torch::nn::EmbeddingOptions(count, width)._weight(weight));
}

}  // namespace

Built build_gpt2(const std::string& name, const ModelOptions& options) {
  Built built{std::make_shared<torch::nn::Module>(), {}};
  const auto body = add_container(*built.root, "transformer");
  auto wte = body->register_module(
      "wte", make_embedding(options.vocab, options.width));
  auto wpe =
      body->register_module("wpe", make_embedding(options.seq, options.width));
  built.stages.push_back(
      make_stage("embed",
                 [name, options, wte, wpe](const Tensor& tokens) mutable {
                   check_tokens(name, options, tokens);
                   const Tensor x = lean_embedding(wte, tokens) +
                                    wpe->weight.narrow(0, 0, tokens.size(1));
                   return torch::dropout(x, options.dropout,
                                         wte->is_training());
                 },
                 {wte, wpe})
          .on_first());

  const auto list = add_container(*body, "h");
  for (int64_t i = 0; i < options.depth; ++i) {
    const std::string number = std::to_string(i);
    const auto block = list->register_module(number, Gpt2Block(options));
    built.stages.push_back(make_block_stage("h." + number, block));
  }
  const auto norm = body->register_module(
      "ln_f", make_layer_norm(options.width, kGpt2Epsilon));
  built.stages.push_back(make_stage("ln_f", norm).on_first());

  // The scores (N, T, vocab) are by far the largest tensor. One stage for them
  // and the loss keeps them from standing between two. The output layer's
  // weight is that of the embedding, asked for at each call: moving the model
  // to a device replaces it.
  auto loss = built.root->register_module("loss", Loss(Task::kLanguage));
  const Stage::Function in_chunks = [wte, loss](const Tensors& in) mutable {
    return loss->forward_in_chunks(in.at(0).flatten(0, 1), wte->weight,
                                   in.at(1).flatten());
  };
  built.stages.push_back(
      make_stage(
          "head",
          [wte, loss, in_chunks](const Tensors& in) mutable {
            // Without a gradient chunks cost nothing; in half precision
            // on CUDA less, since their products have round sizes.
            if (!torch::GradMode::is_enabled() ||
                (in.at(0).is_cuda() &&
                 c10::elementSize(compat::autocast_type(in.at(0))) == 2)) {
              return in_chunks(in);
            }
            return loss->forward(
                lean_linear(in.at(0).flatten(0, 1), wte->weight),
                in.at(1).flatten());
          },
          {wte, loss})
          .with_variant("in chunks", in_chunks));
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

}  // namespace reprise::detail
