#pragma once

#include "models/model_spec.h"

#include <reprise/models/lora.h>
#include <reprise/ops/conv.h>
#include <reprise/ops/linear.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>

/// Building blocks of the models. Tested by tests/models/values_test.cpp.
namespace reprise::detail {

using ModulePtr = std::shared_ptr<torch::nn::Module>;

/// Throws c10::Error unless `supported`; `sizes` describes the image sizes that are.
void check_image_size(const std::string& name, const ModelOptions& options,
                      bool supported, const std::string& sizes);

/// Registers an empty module as `name` in `parent`: one component of a dotted parameter
/// name of the original model. LibTorch does not allow dots in module names.
ModulePtr add_container(torch::nn::Module& parent, const std::string& name);

/// Fills in place from N(0, deviation²), or with zeros.
void normal_init(torch::Tensor weight, double deviation);
void zero_init(torch::Tensor bias);

/// ReLU in place, for the output of a convolution, linear layer or norm, none of which
/// saves it. Must not be applied to the input of a stage.
inline torch::Tensor relu_inplace(torch::Tensor x) {
  return x.relu_();
}

/// Applies `conv`. `first`: it is the first layer of the network, on images.
inline torch::Tensor run_conv(torch::nn::Conv2d conv, const torch::Tensor& x,
                              bool first) {
  return first ? ops::image_conv(conv, x) : conv->forward(x);
}

/// Applies `layer`, with the copy of its weight if there is one.
inline torch::Tensor run_linear(const torch::nn::Linear& layer,
                                const torch::Tensor& x) {
  return ops::linear(x, layer->weight, layer->bias);
}
/// Overload for a layer that may have an adapter.
inline torch::Tensor run_linear(const LoraLinear& layer,
                                const torch::Tensor& x) {
  return layer.ptr()->forward(x);
}
/// residual + run_linear(layer, x); in one matrix product if the layer has no adapter.
inline torch::Tensor add_linear(const torch::Tensor& residual,
                                const LoraLinear& layer, const torch::Tensor& x,
                                bool output_needed = true) {
  if (layer->has_adapter()) return residual + run_linear(layer, x);
  return ops::linear(x, layer->weight, layer->bias, ops::WeightLayout::kOutIn,
                     residual, output_needed);
}

/// ops::packed_linear() of two or three layers, with their adapters. All or none of them
/// have a bias.
std::vector<torch::Tensor> run_packed(const std::vector<LoraLinear>& layers,
                                      const torch::Tensor& x);

/// ops::joined_linear() of such layers: the outputs side by side in one tensor. Undefined if
/// one matrix product does not compute them, or if a layer has an adapter.
torch::Tensor run_joined(const std::vector<LoraLinear>& layers,
                         const torch::Tensor& x);

/// Weights of the layers, and their biases if they have some: groups for
/// BuiltModel::packed_groups.
std::vector<std::vector<torch::Tensor>> packed_groups_of(
    const std::vector<LoraLinear>& layers);

/// Returns `function(inputs...)`; if `recompute`, inside checkpoint(), so that the backward
/// recomputes what it needs instead of saving it.
template <class F, class... T>
auto checkpoint_if(bool recompute, F function, const T&... inputs) {
  return recompute ? checkpoint(function, inputs...) : function(inputs...);
}

/// The same for a function of lists of tensors.
template <class F>
Tensors checkpoint_list_if(bool recompute, F function, const Tensors& inputs) {
  return recompute ? checkpoint_list(function, inputs) : function(inputs);
}

/// A stage that applies `layer` to its first input.
Stage make_linear_stage(const std::string& name,
                        const torch::nn::Linear& layer);

/// Adds the last two stages of an image classifier: a linear layer and the loss.
void add_classifier(BuiltModel& built, const std::string& name,
                    torch::nn::Linear head);

/// Adds a stage of flatten, linear layer, ReLU and dropout.
void add_hidden_layer(BuiltModel& built, const std::string& name,
                      LoraLinear linear, double dropout = 0);

}  // namespace reprise::detail
