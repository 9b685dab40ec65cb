#pragma once

#include <reprise/models/model.h>
#include <reprise/ops/image_conv.h>
#include <reprise/ops/linear.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

/// What the families of models share with the zoo that lists them.
namespace reprise::detail {

using ModulePtr = std::shared_ptr<torch::nn::Module>;

/// A model without what the zoo knows of it already.
struct Built {
  ModulePtr root;
  std::vector<Stage> stages;
  /// Weights and biases that lean_linear() or linear_cross_entropy() get, besides
  /// those of all torch::nn::Linear; may be null.
  std::function<std::vector<torch::Tensor>()> linear_parameters{};
  /// Tables that lean_embedding() gets and that are not among those; may be null.
  std::function<std::vector<torch::Tensor>()> embeddings{};
};

/// `options` are resolved: everything the family uses is set and positive.
using Builder = Built (*)(const std::string& name, const ModelOptions& options);

Built build_mlp(const std::string& name, const ModelOptions& options);
Built build_cnn_basic(const std::string& name, const ModelOptions& options);
Built build_cnn_blocks(const std::string& name, const ModelOptions& options);
Built build_cnn_profile(const std::string& name, const ModelOptions& options);
Built build_vgg16(const std::string& name, const ModelOptions& options);
Built build_resnet18(const std::string& name, const ModelOptions& options);
Built build_resnet50(const std::string& name, const ModelOptions& options);
Built build_resnet101(const std::string& name, const ModelOptions& options);
Built build_unet(const std::string& name, const ModelOptions& options);
Built build_gpt2(const std::string& name, const ModelOptions& options);
Built build_bert(const std::string& name, const ModelOptions& options);
Built build_vit(const std::string& name, const ModelOptions& options);

/// Throws c10::Error unless `fits`; `sizes` says in words what the model takes.
void check_image_size(const std::string& name, const ModelOptions& options,
                      bool fits, const std::string& sizes);

/// An empty module registered under `name` in `parent`: a part of the dotted
/// names that the original has, since LibTorch's own names have no dots.
ModulePtr add_container(torch::nn::Module& parent, const std::string& name);

/// Fills in place from N(0, deviation²), or with zeros.
void normal_init(torch::Tensor weight, double deviation);
void zero_init(torch::Tensor bias);

/// ReLU written over `x`: for what a convolution, linear layer or norm has just
/// returned, which none of them saves. Never for the input of a stage.
inline torch::Tensor relu_inplace(torch::Tensor x) {
  return x.relu_();
}

/// What `conv` gives; `first`: it is the network's first, of images.
inline torch::Tensor run_conv(torch::nn::Conv2d conv, const torch::Tensor& x,
                              bool first) {
  return first ? lean_image_conv(conv, x) : conv->forward(x);
}

/// What `layer` gives, by its weight's copy where there is one.
inline torch::Tensor run_linear(const torch::nn::Linear& layer,
                                const torch::Tensor& x) {
  return lean_linear(x, layer->weight, layer->bias);
}

/// `function(inputs...)`; if `again`, inside checkpoint(), so that what its
/// backward needs is computed once more instead of kept.
template <class F, class... T>
auto checkpoint_if(bool again, F function, const T&... inputs) {
  return again ? checkpoint(function, inputs...) : function(inputs...);
}

}  // namespace reprise::detail
