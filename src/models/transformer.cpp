#include "models/transformer.h"

#include "compat/autocast.h"
#include "models/loss.h"

#include <reprise/ops/dropout.h>

#include <c10/util/Exception.h>

#include <utility>

namespace reprise::detail {

using torch::Tensor;
using torch::nn::Embedding;
using torch::nn::LayerNorm;
using torch::nn::Linear;

LoraLinear make_linear(int64_t from, int64_t to) {
  LoraLinear linear(from, to);
  normal_init(linear->weight, kWeightDeviation);
  zero_init(linear->bias);
  return linear;
}

Linear make_head(int64_t from, int64_t to, bool bias) {
  Linear linear(torch::nn::LinearOptions(from, to).bias(bias));
  normal_init(linear->weight, kWeightDeviation);
  if (bias) zero_init(linear->bias);
  return linear;
}

LayerNorm make_layer_norm(int64_t width, double epsilon) {
  return LayerNorm(torch::nn::LayerNormOptions({width}).eps(epsilon));
}

Embedding make_embedding(int64_t count, int64_t width) {
  const Tensor weight = torch::empty({count, width});
  normal_init(weight, kWeightDeviation);
  return Embedding(torch::nn::EmbeddingOptions(count, width)._weight(weight));
}

NormedInput::NormedInput(const Tensor& x, const Tensor& branch, Norm norm,
                         RecomputeChoice recompute)
    : norm_(std::move(norm)), recompute_(recompute.pointwise) {
  if (recompute_ && !x.is_cuda()) {
    stream_ = branch.defined() ? x + branch : x;
    return;
  }
  const auto made = norm_(x, branch);
  stream_ = made.sum;
  normal_ = made.normalized;
}

Tensors NormedInput::feed(Layers layers, Tensors more) const {
  // Otherwise layers save it in another type.
  const bool as_saved = normal_.defined() && normal_.is_contiguous() &&
                        compat::autocast_type(normal_) == normal_.scalar_type();
  if (recompute_ && !as_saved) {
    more.insert(more.begin(), stream_);
    return checkpoint_list(
        [layers = std::move(layers), norm = norm_](const Tensors& in) {
          Tensors inputs = in;
          inputs[0] = norm(in[0], {}).normalized;
          return layers(inputs);
        },
        more);
  }
  more.insert(more.begin(), normal_);
  if (!recompute_) return layers(more);
  const RecomputeSaved scope(
      normal_, {stream_},
      [norm = norm_](const Tensors& in) { return norm(in[0], {}).normalized; });
  return layers(more);
}

NormedInput::Norm add_norm_with(const LayerNorm& norm) {
  return [norm](const Tensor& x, const Tensor& branch) {
    return ops::add_norm(x, branch, norm);
  };
}

Tensor drop_out(const Tensor& x, double p, bool train,
                RecomputeChoice recompute) {
  return recompute.pointwise ? ops::dropout(x, p, train)
                             : torch::dropout(x, p, train);
}

Tensor run_up(const FeedForward& feed, const Tensor& x) {
  return feed.layers.weight1.defined() ? ops::feed_forward_up(x, feed.layers)
                                       : feed.up(x);
}

Tensor run_down(const FeedForward& feed, const Tensor& x,
                RecomputeChoice recompute, const Tensor& residual) {
  if (ops::has_fused_feed_forward(x, feed.layers)) {
    return ops::feed_forward_down(x, feed.layers, feed.activation,
                                  recompute.pointwise, residual,
                                  !recompute.skip_output);
  }
  const Tensor y = checkpoint_if(
      recompute.pointwise,
      [down = feed.down, activation = feed.activation](const Tensor& t) {
        return down(ops::activate(t, activation));
      },
      x);
  return residual.defined() ? residual + y : y;
}

Tensor add_feed_forward(const FeedForward& feed, const Tensor& residual,
                        const Tensor& x, double dropout,
                        RecomputeChoice recompute) {
  if (dropout == 0) return run_down(feed, x, recompute, residual);
  return residual + drop_out(run_down(feed, x, recompute), dropout,
                             /*train=*/true, recompute);
}

FeedForward make_feed_forward(const LoraLinear& up, const LoraLinear& down,
                              ops::Activation activation) {
  FeedForward made;
  made.activation = activation;
  if (!up->has_adapter() && !down->has_adapter()) {
    made.layers = {up->weight, up->bias, down->weight, down->bias};
  }
  made.up = [up](const Tensor& x) { return run_linear(up, x); };
  made.down = [down](const Tensor& x) { return run_linear(down, x); };
  return made;
}

ModelOptions transformer_options(int64_t depth, int64_t width, double dropout) {
  ModelOptions options;
  options.depth = depth;
  options.width = width;
  options.heads = width / 64;
  options.dropout = dropout;
  return options;
}

ops::QueryKeyValue project_to_heads(const std::vector<LoraLinear>& layers,
                                    const Tensor& x,
                                    const HeadsOptions& options) {
  const Tensor joined = run_joined(layers, x);
  if (joined.defined()) {
    return ops::split_heads(joined, options.heads, options.kv_heads,
                            options.cos, options.sin);
  }
  const auto parts = run_packed(layers, x);
  const auto split = [](const Tensor& t, int64_t heads) {
    return t.view({t.size(0), t.size(1), heads, t.size(2) / heads})
        .transpose(1, 2);
  };
  const Tensor q = split(parts[0], options.heads);
  const Tensor k = split(parts[1], options.kv_heads);
  const Tensor v = split(parts[2], options.kv_heads);
  if (!options.cos.defined()) return {q, k, v};
  return {ops::rotary(q, options.cos, options.sin),
          ops::rotary(k, options.cos, options.sin), v};
}

Tensor multi_head_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                            const MultiHeadOptions& options) {
  ops::AttentionOptions attention;
  attention.mask = options.mask;
  attention.causal = options.causal && !options.mask.defined();
  attention.dropout = options.dropout;
  // A view if the heads of a position are adjacent, as LibTorch's fused kernels write them.
  return ops::attention(q, k, v, attention)
      .transpose(1, 2)
      .reshape({q.size(0), q.size(2), q.size(1) * q.size(3)});
}

SelfAttentionImpl::SelfAttentionImpl(int64_t width, int64_t heads,
                                     double dropout)
    : heads_(heads),
      dropout_(dropout),
      query_(register_module("query", make_linear(width, width))),
      key_(register_module("key", make_linear(width, width))),
      value_(register_module("value", make_linear(width, width))) {}

std::tuple<Tensor, Tensor, Tensor> SelfAttentionImpl::project(const Tensor& x) {
  HeadsOptions options;
  options.heads = options.kv_heads = heads_;
  const auto [q, k, v] = project_to_heads({query_, key_, value_}, x, options);
  return {q, k, v};
}

std::vector<std::vector<Tensor>> SelfAttentionImpl::packed_groups() const {
  return packed_groups_of({query_, key_, value_});
}

Tensor SelfAttentionImpl::attend(const Tensor& q, const Tensor& k,
                                 const Tensor& v) {
  MultiHeadOptions options;
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

void add_language_head(BuiltModel& built, const ModulePtr& module,
                       const std::function<Tensor()>& weight) {
  // The scores (N, T, vocab) are by far the largest tensor. One stage computes them and the
  // loss, so that they are not kept between two stages.
  auto loss = built.root->register_module("loss", Loss(Task::kLanguage));
  const auto in_chunks = [weight, loss](bool recompute) -> Stage::Function {
    return [weight, loss, recompute](const Tensors& in) mutable {
      return loss->forward_in_chunks(in.at(0).flatten(0, 1), weight(),
                                     in.at(1).flatten(), recompute);
    };
  };
  built.stages.push_back(
      make_stage(
          "head",
          [weight, loss,
           chunks = in_chunks(/*recompute=*/false)](const Tensors& in) mutable {
            // Without gradients chunks cost nothing. In half precision on CUDA they are
            // faster, since their matrix products are padded.
            if (!torch::GradMode::is_enabled() ||
                (in.at(0).is_cuda() &&
                 c10::elementSize(compat::autocast_type(in.at(0))) == 2)) {
              return chunks(in);
            }
            return loss->forward(ops::linear(in.at(0).flatten(0, 1), weight()),
                                 in.at(1).flatten());
          },
          {module, loss})
          .with_variant("recompute scores", in_chunks(/*recompute=*/true)));
}

void check_tokens(const std::string& name, const ModelOptions& options,
                  const Tensor& tokens) {
  TORCH_CHECK(tokens.dim() == 2 && tokens.size(1) <= options.seq, "[model ",
              name, "] expected tokens of shape (N, T) with T at most ",
              options.seq, ", got ", tokens.sizes(), "; set seq");
}

void check_tokens(const std::string& name, const ModelOptions& options,
                  const Tensors& batch) {
  check_language_batch(name, batch);
  check_tokens(name, options, batch[0]);
}

}  // namespace reprise::detail
