// Tested by tests/models/values_test.cpp.
#include "compat/autocast.h"
#include "models/rotary_table.h"
#include "models/transformer.h"

#include <reprise/ops/attention.h>
#include <reprise/ops/embedding.h>
#include <reprise/ops/norm.h>

#include <c10/util/Exception.h>
#include <torch/nn.h>

#include <memory>
#include <optional>
#include <tuple>

namespace reprise::detail {
namespace {

using torch::Tensor;

/// What the models of the family differ in, besides their sizes.
struct LlamaConfig {
  double theta = 500'000;
  std::optional<RopeScaling> scaling{};
  double epsilon = 1e-5;
  bool tied = true;       ///< the output layer has the weight of the embedding
  bool qkv_bias = false;  ///< as in Qwen2
};

LoraLinear make_projection(int64_t from, int64_t to, bool bias = false) {
  LoraLinear linear(torch::nn::LinearOptions(from, to).bias(bias));
  normal_init(linear->weight, kWeightDeviation);
  if (bias) zero_init(linear->bias);
  return linear;
}

class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t width, double epsilon)
      : epsilon_(epsilon),
        weight_(register_parameter("weight", torch::ones({width}))) {}

  Tensor forward(const Tensor& x) {
    return ops::rms_norm(x, weight_, epsilon_);
  }

 private:
  double epsilon_;
  Tensor weight_;
};
TORCH_MODULE(RmsNorm);

class LlamaAttentionImpl : public torch::nn::Module {
 public:
  LlamaAttentionImpl(const ModelOptions& options, const LlamaConfig& config,
                     std::shared_ptr<RotaryTable> table)
      : head_dim_(options.width / options.heads),
        table_(std::move(table)),
        q_proj_(register_module(
            "q_proj",
            make_projection(options.width, options.width, config.qkv_bias))),
        k_proj_(register_module(
            "k_proj",
            make_projection(options.width, options.kv_heads * head_dim_,
                            config.qkv_bias))),
        v_proj_(register_module(
            "v_proj",
            make_projection(options.width, options.kv_heads * head_dim_,
                            config.qkv_bias))),
        o_proj_(register_module(
            "o_proj", make_projection(options.width, options.width))) {}

  /// The attention of norm(x). `more`: {mask, cos, sin} of the segments, or nothing.
  Tensor forward(const Tensor& x, RmsNorm norm, RecomputeChoice recompute,
                 const Tensors& more) {
    const auto [q, k, v] = checkpoint_if(
        recompute.pointwise,
        [this, norm](const Tensor& t) mutable { return project(norm(t)); }, x);
    // All that the attention uses is passed in, so that what it saves is counted.
    const auto mix = [this](const Tensor& a, const Tensor& b, const Tensor& c,
                            const auto&... segments) {
      return run_linear(o_proj_, attend(a, b, c, {segments...}));
    };
    return more.empty() ? checkpoint_if(recompute.attention, mix, q, k, v)
                        : checkpoint_if(recompute.attention, mix, q, k, v,
                                        more.at(0), more.at(1), more.at(2));
  }

  std::vector<std::vector<Tensor>> packed_groups() const {
    return packed_groups_of({q_proj_, k_proj_, v_proj_});
  }

 private:
  std::tuple<Tensor, Tensor, Tensor> project(const Tensor& x) {
    const auto parts = run_packed({q_proj_, k_proj_, v_proj_}, x);
    return {parts[0], parts[1], parts[2]};
  }

  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v,
                const Tensors& more) {
    const auto split = [this](const Tensor& t) {  // (N, heads, T, head_dim)
      return t.view({t.size(0), t.size(1), -1, head_dim_}).transpose(1, 2);
    };
    ops::AttentionOptions options;
    options.causal = more.empty();
    if (!more.empty()) options.mask = more[0];
    const auto [cos, sin] = more.empty() ? table_->get(q.device(), q.size(1))
                                         : std::pair(more[1], more[2]);
    return ops::attention(ops::rotary(split(q), cos, sin),
                          ops::rotary(split(k), cos, sin), split(v), options)
        .transpose(1, 2)
        .reshape(q.sizes());
  }

  int64_t head_dim_;
  std::shared_ptr<RotaryTable> table_;
  LoraLinear q_proj_, k_proj_, v_proj_, o_proj_;
};
TORCH_MODULE(LlamaAttention);

class LlamaMlpImpl : public torch::nn::Module {
 public:
  explicit LlamaMlpImpl(const ModelOptions& options)
      : gate_proj_(register_module(
            "gate_proj", make_projection(options.width, options.mlp_width))),
        up_proj_(register_module(
            "up_proj", make_projection(options.width, options.mlp_width))),
        down_proj_(register_module(
            "down_proj", make_projection(options.mlp_width, options.width))) {}

  /// The feed-forward layer of norm(x).
  Tensor forward(const Tensor& x, RmsNorm norm, RecomputeChoice recompute) {
    const auto [gate, up] = checkpoint_if(
        recompute.pointwise,
        [this, norm](const Tensor& t) mutable {
          const auto parts = run_packed({gate_proj_, up_proj_}, norm(t));
          return std::tuple(parts[0], parts[1]);
        },
        x);
    return checkpoint_if(
        recompute.pointwise,
        [this](const Tensor& a, const Tensor& b) {
          return run_linear(down_proj_, ops::swiglu(a, b));
        },
        gate, up);
  }

  std::vector<Tensor> packed_group() const {
    return {gate_proj_->weight, up_proj_->weight};
  }

 private:
  LoraLinear gate_proj_, up_proj_, down_proj_;
};
TORCH_MODULE(LlamaMlp);

class LlamaBlockImpl : public torch::nn::Module {
 public:
  LlamaBlockImpl(const ModelOptions& options, const LlamaConfig& config,
                 std::shared_ptr<RotaryTable> table)
      : self_attn_(register_module(
            "self_attn", LlamaAttention(options, config, std::move(table)))),
        mlp_(register_module("mlp", LlamaMlp(options))),
        input_norm_(register_module("input_layernorm",
                                    RmsNorm(options.width, config.epsilon))),
        mlp_norm_(register_module("post_attention_layernorm",
                                  RmsNorm(options.width, config.epsilon))) {}

  Tensor forward(const Tensor& x, RecomputeChoice recompute,
                 const Tensors& more) {  // x (N, T, C)
    const Tensor y = x + self_attn_->forward(x, input_norm_, recompute, more);
    return y + mlp_->forward(y, mlp_norm_, recompute);
  }

  std::vector<std::vector<Tensor>> packed_groups() const {
    auto groups = self_attn_->packed_groups();
    groups.push_back(mlp_->packed_group());
    return groups;
  }

 private:
  LlamaAttention self_attn_;
  LlamaMlp mlp_;
  RmsNorm input_norm_, mlp_norm_;
};
TORCH_MODULE(LlamaBlock);

std::shared_ptr<RotaryTable> make_rotary_table(const std::string& name,
                                               const ModelOptions& options,
                                               const LlamaConfig& config) {
  const int64_t head_dim = options.width / options.heads;
  TORCH_CHECK(head_dim % 2 == 0, "[model ", name,
              "] expected an even width per head, got ", options.width, " for ",
              options.heads, " heads; set heads or width");
  return std::make_shared<RotaryTable>(
      RotaryOptions{head_dim, options.seq, config.theta, config.scaling});
}

BuiltModel build_with(const std::string& name, const ModelOptions& options,
                      const LlamaConfig& config) {
  BuiltModel built;
  const auto table = make_rotary_table(name, options, config);
  const auto body = add_container(*built.root, "model");
  auto tokens_table = body->register_module(
      "embed_tokens", make_embedding(options.vocab, options.width));
  built.stages.push_back(make_stage(
      "embed",
      [name, options, tokens_table, table](const Tensors& batch) mutable {
        check_tokens(name, options, batch);
        Tensors outputs = batch;
        outputs[0] = ops::embedding(tokens_table, batch[0]);
        if (has_segments(batch)) {
          const Tensor& segments = batch[2];
          const auto [cos, sin] = table->at(segment_positions(segments));
          outputs[2] =
              segment_mask(segments, compat::autocast_type(outputs[0]));
          outputs.insert(outputs.end(), {cos, sin});
        }
        return outputs;
      },
      {tokens_table}));

  const auto list = add_container(*body, "layers");
  std::vector<std::shared_ptr<LlamaBlockImpl>> blocks;
  for (int64_t i = 0; i < options.depth; ++i) {
    const std::string number = std::to_string(i);
    blocks.push_back(
        list->register_module(number, LlamaBlock(options, config, table)));
    built.stages.push_back(
        make_language_block_stage("layers." + number, blocks.back()));
  }
  const auto norm =
      body->register_module("norm", RmsNorm(options.width, config.epsilon));
  built.stages.push_back(make_stage("norm", norm).on_first());

  const auto table_weight = [tokens_table] {
    return std::vector<Tensor>{tokens_table->weight};
  };
  if (config.tied) {
    add_language_head(built, tokens_table,
                      [tokens_table] { return tokens_table->weight; });
    built.linear_parameters = table_weight;
  } else {
    const auto head = built.root->register_module(
        "lm_head", make_head(options.width, options.vocab, /*bias=*/false));
    add_language_head(built, head, [head] { return head->weight; });
    built.embeddings = table_weight;
  }
  built.packed_groups = [blocks] {
    std::vector<std::vector<Tensor>> found;
    for (const auto& block : blocks) {
      for (auto& group : block->packed_groups()) {
        found.push_back(std::move(group));
      }
    }
    return found;
  };
  return built;
}

struct LlamaPreset {
  const char* name;
  const char* description;
  ModelOptions options;
  LlamaConfig config;
};

/// Sizes as in the published configurations. The original limits of the sequences, up to
/// 131,072 tokens, are too long to train with by default.
ModelOptions llama_options(int64_t depth, int64_t width, int64_t mlp_width,
                           int64_t heads, int64_t kv_heads, int64_t vocab,
                           int64_t seq = 2048) {
  ModelOptions options;
  options.depth = depth;
  options.width = width;
  options.heads = heads;
  options.kv_heads = kv_heads;
  options.mlp_width = mlp_width;
  options.vocab = vocab;
  options.seq = seq;
  return options;
}

const std::vector<LlamaPreset>& llama_presets() {
  static const std::vector<LlamaPreset> all = [] {
    const RopeScaling stretched{.factor = 32,
                                .low_freq_factor = 1,
                                .high_freq_factor = 4,
                                .original_positions = 8192};
    const LlamaConfig small{.theta = 10'000};
    const LlamaConfig llama32{.scaling = stretched};
    const LlamaConfig llama3{.tied = false};
    const LlamaConfig qwen{
        .theta = 1'000'000, .epsilon = 1e-6, .qkv_bias = true};
    LlamaConfig large_qwen = qwen;
    large_qwen.tied = false;
    return std::vector<LlamaPreset>{
        {"llama-small", "language model, 3.1M",
         llama_options(4, 256, 768, 8, 2, 256, 256), small},
        {"llama-3.2-1b", "language model, 1236M",
         llama_options(16, 2048, 8192, 32, 8, 128256), llama32},
        {"llama-3.2-3b", "language model, 3213M",
         llama_options(28, 3072, 8192, 24, 8, 128256), llama32},
        {"llama-3-8b", "language model, 8030M",
         llama_options(32, 4096, 14336, 32, 8, 128256), llama3},
        {"qwen2.5-0.5b", "language model, 494M",
         llama_options(24, 896, 4864, 14, 2, 151936), qwen},
        {"qwen2.5-1.5b", "language model, 1544M",
         llama_options(28, 1536, 8960, 12, 2, 151936), qwen},
        {"qwen2.5-7b", "language model, 7616M",
         llama_options(28, 3584, 18944, 28, 4, 152064), large_qwen},
    };
  }();
  return all;
}

BuiltModel build_llama(const std::string& name, const ModelOptions& options) {
  for (const LlamaPreset& preset : llama_presets()) {
    if (preset.name == name) return build_with(name, options, preset.config);
  }
  TORCH_INTERNAL_ASSERT(false, "no preset ", name);
}

}  // namespace

std::vector<ModelSpec> llama_models() {
  std::vector<ModelSpec> specs;
  for (const LlamaPreset& preset : llama_presets()) {
    WeightNames weights{.body_prefix = "model.", .head_prefix = ""};
    if (preset.config.tied) {
      weights.tied = {{"lm_head.weight", "model.embed_tokens.weight"}};
    }
    specs.push_back({preset.name, preset.description, Task::kLanguage,
                     preset.options, build_llama, weights});
  }
  return specs;
}

}  // namespace reprise::detail
