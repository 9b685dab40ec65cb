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

  Tensor forward(const Tensor& x) { return add(x, {}).normalized; }
  ops::AddNormResult add(const Tensor& x, const Tensor& branch) const {
    return ops::add_rms_norm(x, branch, weight_, epsilon_);
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
      : heads_(options.heads),
        kv_heads_(options.kv_heads),
        table_(std::move(table)),
        q_proj_(register_module(
            "q_proj",
            make_projection(options.width, options.width, config.qkv_bias))),
        k_proj_(register_module(
            "k_proj",
            make_projection(options.width,
                            options.kv_heads * options.width / options.heads,
                            config.qkv_bias))),
        v_proj_(register_module(
            "v_proj",
            make_projection(options.width,
                            options.kv_heads * options.width / options.heads,
                            config.qkv_bias))),
        o_proj_(register_module(
            "o_proj", make_projection(options.width, options.width))) {}

  /// `more`: {mask, cos, sin} of the segments, or nothing.
  Tensor forward(const NormedInput& input, RecomputeChoice recompute,
                 const Tensors& more) {
    // All that is used and saved is passed in, so that it is counted. Tables that all
    // layers share are not.
    const Tensors heads =
        input.feed([this](const Tensors& in) { return project(in[0], in); },
                   more.empty() ? Tensors{} : Tensors{more.at(1), more.at(2)});
    const auto mix = [this](const Tensor& q, const Tensor& k, const Tensor& v,
                            const auto&... mask) {
      MultiHeadOptions options;
      options.causal = true;
      if constexpr (sizeof...(mask) > 0) options.mask = (mask, ...);
      return run_linear(o_proj_, multi_head_attention(q, k, v, options));
    };
    return more.empty() ? checkpoint_if(recompute.attention, mix, heads[0],
                                        heads[1], heads[2])
                        : checkpoint_if(recompute.attention, mix, heads[0],
                                        heads[1], heads[2], more[0]);
  }

  std::vector<std::vector<Tensor>> packed_groups() const {
    return packed_groups_of({q_proj_, k_proj_, v_proj_});
  }

 private:
  /// Queries, keys and values. `inputs`: {…, cos, sin}, or one tensor for the table's.
  Tensors project(const Tensor& normal, const Tensors& inputs) {
    HeadsOptions options;
    options.heads = heads_;
    options.kv_heads = kv_heads_;
    std::tie(options.cos, options.sin) =
        inputs.size() > 1 ? std::pair(inputs[1], inputs[2])
                          : table_->get(normal.device(), normal.size(1));
    const auto [q, k, v] =
        project_to_heads({q_proj_, k_proj_, v_proj_}, normal, options);
    return {q, k, v};
  }

  int64_t heads_, kv_heads_;
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

  /// The stream plus the feed-forward layer of its norm.
  Tensor forward(const NormedInput& input, RecomputeChoice recompute) {
    Tensors parts =
        input.feed([this](const Tensors& in) { return expand(in[0]); });
    parts.push_back(input.stream());
    return checkpoint_list_if(
        recompute.pointwise,
        [this, needed = !recompute.skip_output](const Tensors& in) {
          const Tensor y = in.size() == 2 ? ops::packed_swiglu(in[0])
                                          : ops::swiglu(in[0], in[1]);
          return Tensors{add_linear(in.back(), down_proj_, y, needed)};
        },
        parts)[0];
  }

  std::vector<Tensor> packed_group() const {
    return {gate_proj_->weight, up_proj_->weight};
  }

 private:
  /// Gate and up, in one tensor if one matrix product computes both.
  Tensors expand(const Tensor& normal) {
    const Tensor joined = run_joined({gate_proj_, up_proj_}, normal);
    if (joined.defined()) return {joined};
    return run_packed({gate_proj_, up_proj_}, normal);
  }

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
    const auto norm = [](const RmsNorm& layer) -> NormedInput::Norm {
      return [layer](const Tensor& t, const Tensor& branch) {
        return layer->add(t, branch);
      };
    };
    const NormedInput first(x, {}, norm(input_norm_), recompute);
    const Tensor attended = self_attn_->forward(first, recompute, more);
    const NormedInput second(first.stream(), attended, norm(mlp_norm_),
                             recompute);
    return mlp_->forward(second, recompute);
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
    const LlamaConfig llama2{.theta = 10'000, .tied = false};
    const LlamaConfig llama32{.scaling = stretched};
    const LlamaConfig llama3{.tied = false};
    const LlamaConfig qwen{
        .theta = 1'000'000, .epsilon = 1e-6, .qkv_bias = true};
    LlamaConfig large_qwen = qwen;
    large_qwen.tied = false;
    return std::vector<LlamaPreset>{
        {"llama-small", "language model, 3.1M",
         llama_options(4, 256, 768, 8, 2, 256, 256), small},
        {"llama-2-7b", "language model, 6738M",
         llama_options(32, 4096, 11008, 32, 32, 32000), llama2},
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
