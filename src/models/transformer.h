#pragma once

#include "family.h"

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

/// Parts that the transformers share.
namespace reprise::zoo {

/// Deviation of weights at the start, in all three families.
constexpr double kWeightDeviation = 0.02;

/// Weights from N(0, 0.02²), no bias.
torch::nn::Linear make_linear(int64_t from, int64_t to);

torch::nn::LayerNorm make_layer_norm(int64_t width, double epsilon);

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
  torch::Tensor forward(const torch::Tensor& x);  // (N, T, C)

 private:
  int64_t heads_;
  double dropout_;
  torch::nn::Linear query_, key_, value_;
};
TORCH_MODULE(SelfAttention);

/// Throws c10::Error unless `tokens` is (N, T) with T at most `options.seq`.
void check_tokens(const std::string& name, const ModelOptions& options,
                  const torch::Tensor& tokens);

}  // namespace reprise::zoo
