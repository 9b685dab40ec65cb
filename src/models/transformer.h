#pragma once

#include "models/layers.h"
#include "models/segments.h"

#include <reprise/ops/attention.h>
#include <reprise/ops/norm.h>

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <functional>
#include <tuple>

/// Building blocks of the transformers. Tested by tests/models/values_test.cpp.
namespace reprise::detail {

/// Standard deviation of the initial weights.
constexpr double kWeightDeviation = 0.02;

/// Weights from N(0, kWeightDeviation²), zero bias.
LoraLinear make_linear(int64_t from, int64_t to);
/// The same for an output layer, which has no adapter.
torch::nn::Linear make_head(int64_t from, int64_t to, bool bias = true);

torch::nn::LayerNorm make_layer_norm(int64_t width, double epsilon);

/// A table (count, width) from N(0, kWeightDeviation²).
torch::nn::Embedding make_embedding(int64_t count, int64_t width);

/// Which parts of a block the backward recomputes instead of saving their tensors. Results
/// do not change.
struct RecomputeChoice {
  /// Norms and GELU, which are cheap compared with the matrix products. Dropout saves one
  /// byte per value. Only the outputs of the matrix products are saved.
  bool pointwise = false;
  /// Attention from queries, keys and values up to its output layer: two small matrix
  /// products. Without fused attention in LibTorch, attention saves most of all.
  bool attention = false;
  /// Nothing reads the result: its values may be undefined.
  bool skip_output = false;
};

/// The norm at the beginning of a residual branch, and the layers that follow it.
class NormedInput {
 public:
  using Norm = std::function<ops::AddNormResult(const torch::Tensor& x,
                                                const torch::Tensor& branch)>;
  using Layers = std::function<Tensors(const Tensors&)>;

  /// Of x + branch, or x if `branch` is undefined.
  NormedInput(const torch::Tensor& x, const torch::Tensor& branch, Norm norm,
              RecomputeChoice recompute);

  /// x + branch.
  const torch::Tensor& stream() const { return stream_; }

  /// layers({norm(stream), more…}). With `recompute.pointwise`, the output of the norm is not
  /// saved but computed again in the backward.
  Tensors feed(Layers layers, Tensors more = {}) const;

 private:
  Norm norm_;
  bool recompute_;
  torch::Tensor stream_, normal_;  // `normal_`: undefined if not computed yet
};

/// ops::add_norm() with `norm`.
NormedInput::Norm add_norm_with(const torch::nn::LayerNorm& norm);

/// torch::dropout(), or ops::dropout() if `recompute.pointwise` is set.
torch::Tensor drop_out(const torch::Tensor& x, double p, bool train,
                       RecomputeChoice recompute);

/// The feed-forward layer of a block: two linear layers, `up` and `down`, with an activation
/// in between. `up` and `down` apply the layers with their adapters.
struct FeedForward {
  using Layer = std::function<torch::Tensor(const torch::Tensor&)>;
  ops::FeedForwardLayers layers{};  ///< no weights if a layer has an adapter
  ops::Activation activation = ops::Activation::kGelu;
  Layer up{}, down{};
};

/// First layer of `feed`. Its result must be passed to run_down().
torch::Tensor run_up(const FeedForward& feed, const torch::Tensor& x);

/// Activation and second layer of `feed`, plus `residual` if it is defined.
torch::Tensor run_down(const FeedForward& feed, const torch::Tensor& x,
                       RecomputeChoice recompute,
                       const torch::Tensor& residual = {});

/// residual + dropout(run_down(x)). `dropout` must be 0 outside of training.
torch::Tensor add_feed_forward(const FeedForward& feed,
                               const torch::Tensor& residual,
                               const torch::Tensor& x, double dropout,
                               RecomputeChoice recompute);

/// The layers `up` and `down` with an activation in between.
FeedForward make_feed_forward(const LoraLinear& up, const LoraLinear& down,
                              ops::Activation activation);

/// Defaults of a transformer, with heads of 64 channels.
ModelOptions transformer_options(int64_t depth, int64_t width, double dropout);

/// How the projections of an attention layer are divided into heads.
struct HeadsOptions {
  int64_t heads = 1;
  int64_t kv_heads = 1;
  torch::Tensor cos{}, sin{};  ///< see ops::rotary(); undefined: not rotated
};
/// Queries (N, heads, T, D), keys and values (N, kv_heads, T, D) of x (N, T, C). `layers`:
/// the projections to queries, keys and values.
ops::QueryKeyValue project_to_heads(const std::vector<LoraLinear>& layers,
                                    const torch::Tensor& x,
                                    const HeadsOptions& options);

struct MultiHeadOptions {
  bool causal = false;
  torch::Tensor mask{};  ///< see ops::AttentionOptions; replaces `causal`
  double dropout = 0;    ///< must be 0 outside of training
};
/// Attention of q (N, H, T, D) to k and v, with the heads side by side: (N, T, H D).
torch::Tensor multi_head_attention(const torch::Tensor& q,
                                   const torch::Tensor& k,
                                   const torch::Tensor& v,
                                   const MultiHeadOptions& options);

/// Self-attention of BERT and ViT, without its output layer.
class SelfAttentionImpl : public torch::nn::Module {
 public:
  SelfAttentionImpl(int64_t width, int64_t heads, double dropout);
  /// Returns queries, keys and values (N, heads, T, D) of x (N, T, C).
  std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> project(
      const torch::Tensor& x);
  torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k,
                       const torch::Tensor& v);
  /// Parameters that ops::packed_linear() uses in one matrix product if they are packed.
  std::vector<std::vector<torch::Tensor>> packed_groups() const;

 private:
  int64_t heads_;
  double dropout_;
  LoraLinear query_, key_, value_;
};
TORCH_MODULE(SelfAttention);

/// For BuiltModel::packed_groups: the groups of all SelfAttention modules below `root`.
std::function<std::vector<std::vector<torch::Tensor>>()> self_attention_groups(
    const ModulePtr& root);

/// Makes a stage of a block with `forward(x, RecomputeChoice)`, with one variant per choice.
template <class Block>
Stage make_block_stage(const std::string& name, const Block& block) {
  const auto with = [&block](RecomputeChoice recompute) -> Stage::Function {
    return [block, recompute](const Tensors& inputs) mutable {
      recompute.skip_output = outputs_unused();
      return Tensors{block->forward(inputs.at(0), recompute)};
    };
  };
  return Stage(name, with({}), {block})
      .with_variant("recompute pointwise", with({.pointwise = true}))
      .with_variant("recompute attention",
                    with({.pointwise = true, .attention = true}))
      .of_kind("block")
      .on_first();
}

/// Makes a stage of a block of a language model with `forward(x, RecomputeChoice, more)`.
/// `more`: what the first stage made of the segments of the batch; empty if it has none.
template <class Block>
Stage make_language_block_stage(const std::string& name,
                                const std::shared_ptr<Block>& block) {
  const auto with = [&block](RecomputeChoice recompute) -> Stage::Function {
    return [block, recompute](const Tensors& inputs) mutable {
      recompute.skip_output = outputs_unused();
      Tensors outputs = inputs;
      outputs.at(0) =
          block->forward(inputs[0], recompute, segment_tensors(inputs));
      return outputs;
    };
  };
  return Stage(name, with({}), {block})
      .with_variant("recompute pointwise", with({.pointwise = true}))
      .with_variant("recompute attention",
                    with({.pointwise = true, .attention = true}))
      .of_kind("block");
}

/// Adds the last stage of a language model, "head": scores with the weight (vocab, C) of
/// `module`, and the loss. `weight` returns that weight; it is called at each run, since
/// moving a model to a device replaces its tensors. The variant "recompute scores" stores
/// neither all scores nor gradients between forward and backward.
void add_language_head(BuiltModel& built, const ModulePtr& module,
                       const std::function<torch::Tensor()>& weight);

/// Throws c10::Error unless `tokens` is (N, T) with T at most `options.seq`.
void check_tokens(const std::string& name, const ModelOptions& options,
                  const torch::Tensor& tokens);
/// The same for the batch of a language model, with check_language_batch().
void check_tokens(const std::string& name, const ModelOptions& options,
                  const Tensors& batch);

}  // namespace reprise::detail
