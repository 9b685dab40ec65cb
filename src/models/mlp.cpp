// Tested by tests/models/zoo_test.cpp.
#include "models/layers.h"

#include <torch/nn.h>

namespace reprise::detail {
namespace {

BuiltModel build_mlp(const std::string&, const ModelOptions& options) {
  BuiltModel built;
  int64_t from = options.channels * options.image_size * options.image_size;
  for (int64_t i = 0; i < options.depth; ++i) {
    LoraLinear linear(from, options.width);
    // For ReLU (He et al. 2015). LibTorch's default divides the variance of activations
    // and gradients by six per layer, which makes those of a deep chain denormal.
    torch::nn::init::kaiming_uniform_(linear->weight, /*a=*/0, torch::kFanIn,
                                      torch::kReLU);
    torch::nn::init::zeros_(linear->bias);
    add_hidden_layer(built, "hidden" + std::to_string(i), linear,
                     options.dropout);
    from = options.width;
  }
  add_classifier(built, "head", torch::nn::Linear(from, options.classes));
  return built;
}

}  // namespace

std::vector<ModelSpec> mlp_models() {
  ModelOptions options = image_options(28, 1, 10, 512);
  options.depth = 4;
  options.dropout = 0;
  return {{"mlp", "linear layers on flattened images", Task::kImages, options,
           build_mlp}};
}

}  // namespace reprise::detail
