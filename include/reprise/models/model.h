#pragma once

#include <reprise/recompute/chain.h>

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace reprise {

/// What a model takes and is trained for.
enum class Task {
  kImages,     ///< x (N, C, S, S) float; targets (N) int64: a class an image
  kPixels,     ///< x (N, C, S, S) float; targets (N, S, S) int64
  kSequences,  ///< x (N, T) int64 tokens; targets (N) int64: a class a sequence
  kLanguage,   ///< x (N, T) int64 tokens; targets (N, T) int64, -100: ignored
};

/// Zero (or empty) means the model's own default. What a model has no use for
/// must be left so: setting it is an error that says so.
struct ModelOptions {
  int64_t depth = 0;       ///< blocks, or levels of the unet
  int64_t width = 0;       ///< hidden size, or channels of the first stage
  int64_t heads = 0;       ///< attention heads; default: of 64 each
  int64_t classes = 0;     ///< what a prediction chooses from
  int64_t vocab = 0;       ///< tokens
  int64_t seq = 0;         ///< longest sequence
  int64_t image_size = 0;  ///< side in pixels
  int64_t channels = 0;    ///< of the image
  std::string norm{};      ///< "batch" or "group", where there is a choice
  double dropout = -1;     ///< negative: the model's own
};

/// A model of the zoo.
struct Model {
  std::string name;
  ModelOptions options;  ///< as resolved: all that the model uses is set
  Task task = Task::kImages;
  /// Owns all modules. Its `named_parameters()` and `named_buffers()` have the
  /// names and shapes of Hugging Face's gpt2, bert and vit, of torchvision's
  /// resnet and vgg.
  std::shared_ptr<torch::nn::Module> root;
  /// {x, targets} → {sum of losses}; in evaluation mode {sum of losses, number
  /// of right predictions, double}. A stage is a block. Both are sums over
  /// samples (kImages, kSequences), over samples of the mean over pixels
  /// (kPixels), over tokens that are not ignored (kLanguage). The loss is in
  /// single precision whatever the model's is.
  Chain chain;
  /// Weights of the linear layers, then their biases, which WeightCopies may have
  /// copies of. To be asked for again when the model has moved to another device.
  std::function<std::vector<torch::Tensor>()> linear_parameters{};
  /// Tables of lean_embedding() that are not among these; likewise.
  std::function<std::vector<torch::Tensor>()> embeddings{};
  /// Parameters for pack_contiguous(), so that one product takes a group.
  std::function<std::vector<std::vector<torch::Tensor>>()> groups{};
};

/// Names and one line each, in the order of the help.
struct ModelInfo {
  std::string name;
  std::string description;
};
const std::vector<ModelInfo>& model_list();

/// What the model is for, without making it. Throws c10::Error on an unknown
/// name (with the nearest one).
Task task_of(std::string_view name);

/// Makes the model on the CPU in single precision, initialised from LibTorch's
/// default generator as its original is. Throws c10::Error on an unknown name
/// (with the nearest one) and on options it cannot take.
Model make_model(std::string_view name, const ModelOptions& options = {});

/// {x, targets} of noise for a model of that task and these options, as resolved, from
/// LibTorch's default generator. Of a language's targets the first of each sequence is
/// ignored.
Tensors random_batch(Task task, const ModelOptions& options, int64_t samples,
                     torch::Device device = torch::kCPU);

/// Number of parameters, shared ones once.
int64_t parameter_count(const Model& model);

}  // namespace reprise
