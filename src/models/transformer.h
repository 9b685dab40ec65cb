#pragma once

#include "models/family.h"

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <tuple>

/// Parts that the transformers share.
namespace reprise::detail {

/// Deviation of weights at the start, in all three families.
constexpr double kWeightDeviation = 0.02;

/// Weights from N(0, 0.02²), no bias.
torch::nn::Linear make_linear(int64_t from, int64_t to);

torch::nn::LayerNorm make_layer_norm(int64_t width, double epsilon);

/// What a block computes once more in its backward instead of keeping it, and
/// what is left of the tensors that all blocks keep. The result is the same.
struct RecomputeChoice {
  /// Norms and GELU, which cost next to nothing beside the matrix products; and
  /// dropout keeps a byte a value. Left are the results of the products.
  bool pointwise = false;
  /// Attention up to its output layer, from queries, keys and values: two small
  /// products. Where LibTorch has no fused attention, that is what keeps most.
  bool attention = false;
};

/// torch::dropout, or the one that keeps less.
torch::Tensor drop_out(const torch::Tensor& x, double p, bool train,
                       RecomputeChoice again);

/// Attention of queries, keys and values (N, T, C), cut into `heads`.
struct HeadsOptions {
  int64_t heads = 1;
  bool causal = false;
  double dropout = 0;  ///< 0 outside of training
};
torch::Tensor attend_heads(const torch::Tensor& q, const torch::Tensor& k,
                           const torch::Tensor& v, const HeadsOptions& options);

/// Self-attention of BERT and ViT, up to its output layer.
class SelfAttentionImpl : public torch::nn::Module {
 public:
  SelfAttentionImpl(int64_t width, int64_t heads, double dropout);
  /// Queries, keys and values of x (N, T, C).
  std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> project(
      const torch::Tensor& x);
  torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k,
                       const torch::Tensor& v);
  /// Parameters that one product takes where they lie together.
  std::vector<std::vector<torch::Tensor>> groups() const;

 private:
  int64_t heads_;
  double dropout_;
  torch::nn::Linear query_, key_, value_;
};
TORCH_MODULE(SelfAttention);

/// A stage of a block with `forward(x, RecomputeChoice)`, and its variants.
template <class Block>
Stage make_block_stage(const std::string& name, const Block& block) {
  const auto with = [&block](RecomputeChoice again) -> Stage::Function {
    return [block, again](const Tensors& inputs) mutable {
      return Tensors{block->forward(inputs.at(0), again)};
    };
  };
  return make_stage(name, block)
      .with_variant("pointwise again", with({.pointwise = true}))
      .with_variant("attention again",
                    with({.pointwise = true, .attention = true}))
      .of_kind("block")
      .on_first();
}

/// Throws c10::Error unless `tokens` is (N, T) with T at most `options.seq`.
void check_tokens(const std::string& name, const ModelOptions& options,
                  const torch::Tensor& tokens);

}  // namespace reprise::detail
