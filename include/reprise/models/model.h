#pragma once

#include <reprise/recompute/chain.h>

#include <torch/nn/module.h>

#include <cstdint>
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
  int64_t depth = 0;       ///< blocks
  int64_t width = 0;       ///< hidden size, or channels of the first stage
  int64_t heads = 0;       ///< attention heads
  int64_t classes = 0;     ///< default 10 for images, 2 for sequences
  int64_t vocab = 0;       ///< tokens
  int64_t seq = 0;         ///< longest sequence
  int64_t image_size = 0;  ///< side in pixels
  int64_t channels = 0;    ///< of the image; default 1 for cnn-basic, mlp, unet
  std::string norm;        ///< "batch" or "group", where there is a choice
  double dropout = -1;     ///< negative: the model's own
};

/// A model of the zoo.
struct Model {
  std::string name;
  ModelOptions options;  ///< as resolved: nothing is 0
  Task task = Task::kImages;
  /// Owns all modules. Its `named_parameters()` and `named_buffers()` have the
  /// names and shapes of Hugging Face's gpt2, bert and vit, of torchvision's
  /// resnet and vgg.
  std::shared_ptr<torch::nn::Module> root;
  /// {x, targets} → {sum of losses}; in evaluation mode {sum of losses, number
  /// of right predictions}. A stage is a block. The sum is over samples (kImages,
  /// kSequences), over samples of the mean over pixels (kPixels), over tokens
  /// that are not ignored (kLanguage).
  Chain chain;
};

/// Names and one line each, in the order of the help.
struct ModelInfo {
  std::string name;
  std::string description;
};
const std::vector<ModelInfo>& model_list();

/// Makes the model on the CPU in single precision, initialised from LibTorch's
/// default generator as its original is. Throws c10::Error on an unknown name
/// (with the nearest one) and on options it cannot take.
Model make_model(std::string_view name, const ModelOptions& options = {});

/// Number of parameters, shared ones once.
int64_t parameter_count(const Model& model);

}  // namespace reprise
