#include "models/transformer.h"

#include "compat/attention.h"

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

Tensor drop_out(const Tensor& x, double p, bool train, RecomputeChoice again) {
  return again.pointwise ? lean_dropout(x, p, train)
                         : torch::dropout(x, p, train);
}

Tensor attend_heads(const Tensor& q, const Tensor& k, const Tensor& v,
                    const HeadsOptions& options) {
  const int64_t heads = options.heads;
  const auto split = [heads](const Tensor& t) {  // (N, H, T, D)
    return t.view({t.size(0), t.size(1), heads, t.size(2) / heads})
        .transpose(1, 2);
  };
  compat::AttentionOptions how;
  how.causal = options.causal;
  how.dropout = options.dropout;
  return compat::attention(split(q), split(k), split(v), how)
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
  const Tensor all =
      qkv_linear(x, {query_->weight, key_->weight, value_->weight},
                 {query_->bias, key_->bias, value_->bias});
  if (all.defined()) {
    const auto parts = all.chunk(3, -1);
    return {parts[0], parts[1], parts[2]};
  }
  Tensor q = run_linear(query_, x);
  Tensor k = run_linear(key_, x);
  return {q, k, run_linear(value_, x)};
}

std::vector<std::vector<Tensor>> SelfAttentionImpl::groups() const {
  return {{query_->weight, key_->weight, value_->weight},
          {query_->bias, key_->bias, value_->bias}};
}

Tensor SelfAttentionImpl::attend(const Tensor& q, const Tensor& k,
                                 const Tensor& v) {
  HeadsOptions options;
  options.heads = heads_;
  options.dropout = is_training() ? dropout_ : 0;
  return attend_heads(q, k, v, options);
}

void check_tokens(const std::string& name, const ModelOptions& options,
                  const Tensor& tokens) {
  TORCH_CHECK(tokens.dim() == 2 && tokens.size(1) <= options.seq, "[model ",
              name, "] expected tokens of shape (N, T) with T at most ",
              options.seq, ", got ", tokens.sizes(), "; set seq");
}

}  // namespace reprise::detail
