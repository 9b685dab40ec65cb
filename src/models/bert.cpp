// Tested by tests/models/values_test.cpp.
#include "models/loss.h"
#include "models/transformer.h"

#include <reprise/ops/embedding.h>
#include <reprise/ops/norm.h>

#include <torch/nn.h>

namespace reprise::detail {
namespace {

using torch::Tensor;
using torch::nn::Embedding;
using torch::nn::EmbeddingOptions;
using torch::nn::LayerNorm;

constexpr double kBertEpsilon = 1e-12;
constexpr int64_t kTokenTypes = 2;

class BertEmbeddingsImpl : public torch::nn::Module {
 public:
  explicit BertEmbeddingsImpl(const ModelOptions& options)
      : dropout_(options.dropout),
        // Token 0 is padding: its row is zero and gets no gradient.
        word_(register_module(
            "word_embeddings",
            Embedding(EmbeddingOptions(options.vocab, options.width)
                          .padding_idx(0)))),
        position_(register_module("position_embeddings",
                                  Embedding(options.seq, options.width))),
        type_(register_module("token_type_embeddings",
                              Embedding(kTokenTypes, options.width))),
        norm_(register_module("LayerNorm",
                              make_layer_norm(options.width, kBertEpsilon))) {
    normal_init(word_->weight, kWeightDeviation);
    zero_init(word_->weight[0]);
    normal_init(position_->weight, kWeightDeviation);
    normal_init(type_->weight, kWeightDeviation);
  }

  Tensor forward(const Tensor& tokens) {  // (N, T)
    const Tensor x = ops::embedding(word_, tokens) + type_->weight[0] +
                     position_->weight.narrow(0, 0, tokens.size(1));
    return torch::dropout(norm_(x), dropout_, is_training());
  }

  const Tensor& word_weight() const { return word_->weight; }

 private:
  double dropout_;
  Embedding word_, position_, type_;
  LayerNorm norm_;
};
TORCH_MODULE(BertEmbeddings);

/// An output layer, and the norm of its sum with the input of the block.
class BertOutputImpl : public torch::nn::Module {
 public:
  BertOutputImpl(int64_t from, const ModelOptions& options)
      : dropout_(options.dropout),
        dense_(register_module("dense", make_linear(from, options.width))),
        norm_(register_module("LayerNorm",
                              make_layer_norm(options.width, kBertEpsilon))) {}

  Tensor dense(const Tensor& x) { return run_linear(dense_, x); }
  Tensor drop(const Tensor& x, RecomputeChoice recompute) {
    return drop_out(x, dropout_, is_training(), recompute);
  }
  const LayerNorm& norm() const { return norm_; }
  const LoraLinear& layer() const { return dense_; }

 private:
  double dropout_;
  LoraLinear dense_;
  LayerNorm norm_;
};
TORCH_MODULE(BertOutput);

class BertLayerImpl : public torch::nn::Module {
 public:
  explicit BertLayerImpl(const ModelOptions& options) {
    const auto attention = add_container(*this, "attention");
    self_ = attention->register_module(
        "self", SelfAttention(options.width, options.heads, options.dropout));
    mixed_ = attention->register_module("output",
                                        BertOutput(options.width, options));
    up_ = add_container(*this, "intermediate")
              ->register_module("dense",
                                make_linear(options.width, 4 * options.width));
    down_ = register_module("output", BertOutput(4 * options.width, options));
  }

  Tensor forward(const Tensor& x,
                 RecomputeChoice recompute = {}) {  // (N, T, C)
    // The output of the norm is both the residual and the input of the feed-forward layer.
    const FeedForward feed =
        make_feed_forward(up_, down_->layer(), ops::Activation::kGelu);
    const auto expand = [this, feed](const Tensor& stream,
                                     const auto&... added) {
      const auto [y, rounded] =
          ops::post_norm(stream, Tensor(added...), mixed_->norm());
      return std::tuple(y, run_up(feed, rounded));
    };
    const Tensor mixed = mixed_->drop(attend(x, recompute), recompute);
    const auto [y, up] =
        recompute.pointwise ? checkpoint(expand, mixed + x) : expand(x, mixed);
    const Tensor down = down_->drop(
        run_down(feed, up, {.pointwise = recompute.pointwise}), recompute);
    return ops::post_norm(y, down, down_->norm(), /*round=*/false).stream;
  }

 private:
  Tensor attend(const Tensor& x, RecomputeChoice recompute) {
    const auto [q, k, v] = self_->project(x);
    return checkpoint_if(
        recompute.attention,
        [this](const Tensor& a, const Tensor& b, const Tensor& c) {
          return mixed_->dense(self_->attend(a, b, c));
        },
        q, k, v);
  }

  SelfAttention self_{nullptr};
  BertOutput mixed_{nullptr};
  LoraLinear up_{nullptr};
  BertOutput down_{nullptr};
};
TORCH_MODULE(BertLayer);

BuiltModel build_bert(const std::string& name, const ModelOptions& options) {
  BuiltModel built;
  const auto body = add_container(*built.root, "bert");
  auto embeddings =
      body->register_module("embeddings", BertEmbeddings(options));
  built.stages.push_back(
      make_stage("embed",
                 [name, options, embeddings](const Tensor& tokens) mutable {
                   check_tokens(name, options, tokens);
                   return embeddings->forward(tokens);
                 },
                 {embeddings})
          .on_first());

  const auto list = add_container(*add_container(*body, "encoder"), "layer");
  for (int64_t i = 0; i < options.depth; ++i) {
    const std::string number = std::to_string(i);
    const auto layer = list->register_module(number, BertLayer(options));
    built.stages.push_back(make_block_stage("layer." + number, layer));
  }

  // The classifier uses the first token.
  auto pooler =
      add_container(*body, "pooler")
          ->register_module("dense", make_linear(options.width, options.width));
  auto classifier = built.root->register_module(
      "classifier", make_head(options.width, options.classes));
  built.stages.push_back(
      make_stage("head",
                 [pooler, classifier,
                  dropout = options.dropout](const Tensor& x) mutable {
                   const Tensor pooled =
                       torch::tanh(run_linear(pooler, x.select(1, 0)));
                   return run_linear(
                       classifier,
                       torch::dropout(pooled, dropout, pooler->is_training()));
                 },
                 {pooler, classifier})
          .on_first());
  const auto loss = built.root->register_module("loss", Loss(Task::kSequences));
  built.stages.push_back(make_stage("loss", loss));
  built.embeddings = [embeddings] {
    return std::vector<Tensor>{embeddings->word_weight()};
  };
  built.packed_groups = self_attention_groups(built.root);
  return built;
}

ModelOptions bert_options(int64_t depth, int64_t width) {
  ModelOptions options = transformer_options(depth, width, 0.1);
  options.vocab = 30522;
  options.seq = 512;
  options.classes = 2;
  return options;
}

}  // namespace

std::vector<ModelSpec> bert_models() {
  const WeightNames weights{.body_prefix = "bert.",
                            .head_prefix = "classifier.",
                            .foreign_prefixes = {"cls."}};
  return {
      {"bert-base", "sequence classification, 109M", Task::kSequences,
       bert_options(12, 768), build_bert, weights},
      {"bert-large", "sequence classification, 335M", Task::kSequences,
       bert_options(24, 1024), build_bert, weights},
  };
}

}  // namespace reprise::detail
