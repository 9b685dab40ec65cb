#pragma once

#include <reprise/recompute/chain.h>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace reprise {

/// Inputs of a model and what it is trained for.
enum class Task {
  kImages,     ///< x (N, C, S, S) float; targets (N) int64, one class per image
  kPixels,     ///< x (N, C, S, S) float; targets (N, S, S) int64
  kSequences,  ///< x (N, T) int64 tokens; targets (N) int64, one class each
  kLanguage,   ///< x (N, T) int64 tokens; targets (N, T) int64, -100: ignored;
               ///< optionally segments (N, T) int64: rows of several documents
  kOther,      ///< anything else, from datasets of the caller
};

/// Value of an option that a model has registered for itself.
using OptionValue = std::variant<bool, int64_t, double, std::string>;

/// Zero (or empty) selects the model's default. Setting an option that the model does not
/// have is an error.
struct ModelOptions {
  int64_t depth = 0;  ///< blocks, or levels of the unet
  int64_t width = 0;  ///< hidden size, or channels of the first stage
  /// Attention heads. Default if the width is set: heads as wide as the original's.
  int64_t heads = 0;
  /// Heads of keys and values in grouped-query attention; divides heads. Default if heads or
  /// the width is set: about as many heads share one as in the original.
  int64_t kv_heads = 0;
  /// Hidden size of gated feed-forward layers. Default: in proportion to the width.
  int64_t mlp_width = 0;
  int64_t classes = 0;     ///< number of classes
  int64_t vocab = 0;       ///< number of tokens in the vocabulary
  int64_t seq = 0;         ///< maximum sequence length
  int64_t image_size = 0;  ///< side in pixels
  int64_t channels = 0;    ///< image channels
  std::string norm{};      ///< "batch" or "group"
  double dropout = -1;     ///< negative: the model's default
  /// Options of ModelEntry::own_options, by name; those that are missing have their
  /// defaults.
  std::map<std::string, OptionValue> own{};

  /// Value of an option in `own`: `options.get<int64_t>("taps")`. Throws c10::Error if the
  /// option is missing or T is not the type of its default.
  template <class T>
  const T& get(const std::string& name) const {
    const auto found = own.find(name);
    const T* value =
        found == own.end() ? nullptr : std::get_if<T>(&found->second);
    TORCH_CHECK(value != nullptr, "[ModelOptions::get] expected an option '",
                name, "' in ModelEntry::own_options, with a default of the ",
                "type that is asked for, got ",
                found == own.end() ? "none" : "one of another type");
    return *value;
  }
};

/// A model to train: modules, and a chain that ends in the sum of the losses. The caller
/// makes it from modules of any kind, or make_model() makes a built-in one:
///
///     Model model{.name = "own", .root = net, .chain = net->chain()};
struct Model {
  std::string name{};
  ModelOptions
      options{};  ///< of built-in models: all that the model has are set
  Task task = Task::kImages;  ///< of built-in models
  /// Owns all modules. Those of built-in models have the names and shapes of parameters and
  /// buffers of Hugging Face's gpt2, bert, llama, qwen2 and vit, and of torchvision's resnet
  /// and vgg.
  std::shared_ptr<torch::nn::Module> root{};
  /// Maps the tensors of a Batch to the sum of the losses, a scalar, over whatever
  /// Batch::count counts. In evaluation mode, the sums of `metrics` follow it. Further
  /// outputs in training mode are ignored.
  ///
  /// Built-in models map {x, targets}, and have one stage per block. Their sums are over
  /// samples (kImages, kSequences), over samples of the mean over pixels (kPixels), or over
  /// tokens that are not ignored (kLanguage). The loss is float32 whatever the type of the
  /// model. Those for kLanguage also map {x, targets, segments}: segments has the number of
  /// the document of each token, increasing from left to right, and 0 for padding. A token
  /// attends only to earlier tokens of its document, and positions restart at each document.
  Chain chain;
  /// Weights of the linear layers, then their biases, for WeightCopies. Weights that
  /// something else than an operator (reprise/ops) reads as well must not be among them,
  /// unless stages share them. Must be called again after the model has moved to another
  /// device.
  std::function<std::vector<torch::Tensor>()> linear_parameters{};
  /// Tables of ops::embedding() that are not among linear_parameters; null if there are
  /// none. Must be called again likewise.
  std::function<std::vector<torch::Tensor>()> embeddings{};
  /// Groups of parameters to pass to ops::pack_contiguous(), so that one matrix product can
  /// use a whole group.
  std::function<std::vector<std::vector<torch::Tensor>>()> packed_groups{};
  /// Identifies what the model computes: its code, sizes and options. Measured costs are
  /// stored on disk under this key and used again; if it is empty, they are not stored.
  std::string cost_key{};
  /// Names of the outputs that follow the loss in evaluation mode. Their sums are divided
  /// by the count, as that of the loss. Built-in models have "accuracy".
  std::vector<std::string> metrics{};
};

struct ModelInfo {
  std::string name;
  std::string description;
};

/// All models that are registered (registry.h), in the order in which the command lists
/// them: the built-in ones first.
std::vector<ModelInfo> model_list();

/// Task of the model `name`. Throws c10::Error on an unknown name and suggests the nearest
/// one.
Task task_of(std::string_view name);

/// Makes a model on the CPU in float32, initialized as the original from LibTorch's default
/// generator. Throws c10::Error on an unknown name, suggesting the nearest one, and on
/// options that the model does not have or support.
Model make_model(std::string_view name, const ModelOptions& options = {});

/// Random {x, targets} for a model with this task and these resolved options, from
/// LibTorch's default generator. For kLanguage the first target of each sequence is ignored.
/// Throws c10::Error for kOther.
Tensors random_batch(Task task, const ModelOptions& options, int64_t samples,
                     torch::Device device = torch::kCPU);

/// Number of parameters; shared ones count once.
int64_t parameter_count(const Model& model);

/// Loads all parameters and buffers of `model` from safetensors with the names of Hugging
/// Face or torchvision, converting types. `path`: a file; the index of a checkpoint in
/// several files (model.safetensors.index.json), which are next to it; or a directory with
/// model.safetensors or such an index. Holds one tensor in memory at a time. Throws
/// c10::Error, without changing the model, on a missing file, a missing tensor, an unknown
/// tensor or a different shape; the error has the name and both shapes.
///
/// Accepted: names with or without the common prefix (such as "transformer." or "bert."),
/// tied weights stored twice with equal values, constant buffers (attention masks, position
/// ids, rotary frequencies), a missing head or batch counter, and the head of another task.
void load_weights(Model& model, const std::string& path);

/// Saves all parameters and buffers with the names of the original. Tied weights are stored
/// once, and adapters (lora.h) are merged into the weights. If `path` ends in
/// .safetensors.index.json, they are divided among files of at most `part_bytes` next to it, as
/// Hugging Face does.
void export_weights(const Model& model, const std::string& path,
                    int64_t part_bytes = 5'000'000'000);

struct SampleChainOptions {
  torch::Device device = torch::kCPU;
  int64_t batch = 6;
  /// Wrap part of each block in checkpoint(), in addition to the schedule.
  bool nested_checkpoint = false;
};

/// A small chain with features that are difficult to recompute, and data for it, to verify
/// schedules with. Its last stage returns the sum of the losses and their number.
struct SampleChain {
  std::string name;
  std::string description;
  /// Makes the chain, initialized from LibTorch's default generator.
  std::function<Chain(const SampleChainOptions&)> make_chain;
  /// Makes a random batch, from LibTorch's default generator.
  std::function<Tensors(const SampleChainOptions&)> make_inputs;
};

/// tiny-mlp (dropout), tiny-cnn (BatchNorm), tiny-transformer (dropout, tied weights) and
/// tiny-skip (skip connections and a mask that cross stages).
const std::vector<SampleChain>& sample_chains();

}  // namespace reprise
