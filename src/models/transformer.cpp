#include "models/transformer.h"

#include <reprise/ops/attention.h>
#include <reprise/ops/dropout.h>

#include <c10/util/Exception.h>

namespace reprise::detail {

using torch::Tensor;
using torch::nn::LayerNorm;
using torch::nn::Linear;

Linear make_linear(int64_t from, int64_t to) {
  Linear linear(from, to);
  normal_init(linear->weight, kWeightDeviation);
  zero_init(linear->bias);
  return linear;
}

LayerNorm make_layer_norm(int64_t width, double epsilon) {
  return LayerNorm(torch::nn::LayerNormOptions({width}).eps(epsilon));
}

Tensor drop_out(const Tensor& x, double p, bool train,
                RecomputeChoice recompute) {
  return recompute.pointwise ? ops::dropout(x, p, train)
                             : torch::dropout(x, p, train);
}

ModelOptions transformer_options(int64_t depth, int64_t width, double dropout) {
  ModelOptions options;
  options.depth = depth;
  options.width = width;
  options.heads = width / 64;
  options.dropout = dropout;
  return options;
}

Tensor multi_head_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                            const MultiHeadOptions& options) {
  const int64_t heads = options.heads;
  const auto split = [heads](const Tensor& t) {  // (N, H, T, D)
    return t.view({t.size(0), t.size(1), heads, t.size(2) / heads})
        .transpose(1, 2);
  };
  ops::AttentionOptions attention;
  attention.causal = options.causal;
  attention.dropout = options.dropout;
  return ops::attention(split(q), split(k), split(v), attention)
      .transpose(1, 2)
      .reshape(q.sizes());
}

SelfAttentionImpl::SelfAttentionImpl(int64_t width, int64_t heads,
                                     double dropout)
    : heads_(heads),
      dropout_(dropout),
      query_(register_module("query", make_linear(width, width))),
      key_(register_module("key", make_linear(width, width))),
      value_(register_module("value", make_linear(width, width))) {}

std::tuple<Tensor, Tensor, Tensor> SelfAttentionImpl::project(const Tensor& x) {
  const auto parts =
      ops::packed_linear(x, {query_->weight, key_->weight, value_->weight},
                         {query_->bias, key_->bias, value_->bias});
  return {parts[0], parts[1], parts[2]};
}

std::vector<std::vector<Tensor>> SelfAttentionImpl::packed_groups() const {
  return {{query_->weight, key_->weight, value_->weight},
          {query_->bias, key_->bias, value_->bias}};
}

Tensor SelfAttentionImpl::attend(const Tensor& q, const Tensor& k,
                                 const Tensor& v) {
  MultiHeadOptions options;
  options.heads = heads_;
  options.dropout = is_training() ? dropout_ : 0;
  return multi_head_attention(q, k, v, options);
}

std::function<std::vector<std::vector<Tensor>>()> self_attention_groups(
    const ModulePtr& root) {
  return [root] {
    std::vector<std::vector<Tensor>> found;
    for (const auto& module : root->modules(/*include_self=*/false)) {
      if (const auto* layer = module->as<SelfAttention>()) {
        for (auto& group : layer->packed_groups()) {
          found.push_back(std::move(group));
        }
      }
    }
    return found;
  };
}

void check_tokens(const std::string& name, const ModelOptions& options,
                  const Tensor& tokens) {
  TORCH_CHECK(tokens.dim() == 2 && tokens.size(1) <= options.seq, "[model ",
              name, "] expected tokens of shape (N, T) with T at most ",
              options.seq, ", got ", tokens.sizes(), "; set seq");
}

}  // namespace reprise::detail
