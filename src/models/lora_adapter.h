#pragma once

#include <reprise/models/lora.h>

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

/// The adapters of a model. Tested by tests/models/lora_test.cpp.
namespace reprise::detail {

constexpr const char* kAllLinear = "all-linear";

/// One of the matrices of an adapter: a module, so that its parameter has PEFT's name.
class LoraMatrixImpl : public torch::nn::Module {
 public:
  explicit LoraMatrixImpl(torch::Tensor value)
      : weight(register_parameter("weight", std::move(value))) {}
  torch::Tensor weight;
};

struct LoraAdapter {
  LoraOptions options;
  std::shared_ptr<LoraMatrixImpl> a, b;
};

/// Gives access to the adapter of a layer.
struct LoraAccess {
  static std::shared_ptr<LoraAdapter>& adapter(LoraLayer& layer) {
    return layer.adapter_;
  }
};

/// A layer of a model that can have an adapter.
struct NamedLoraLayer {
  std::string name;  ///< as in named_modules() of the root
  std::shared_ptr<torch::nn::Module> module;
  LoraLayer* layer;  ///< the same object

  /// Null if it has none.
  const std::shared_ptr<LoraAdapter>& adapter() const {
    return LoraAccess::adapter(*layer);
  }
};

/// All layers that can have an adapter, in the order of the modules.
std::vector<NamedLoraLayer> lora_layers(const Model& model);

/// Those of them that have one.
std::vector<NamedLoraLayer> adapted_layers(const Model& model);

/// The words of a list that is separated by commas; empty ones are left out.
std::vector<std::string> split_targets(const std::string& targets);

/// Whether the parameter `name` is a matrix of an adapter.
bool is_adapter_parameter(const std::string& name);

/// Weight of an adapted layer plus the product of its adapter, in the layout of the weight.
torch::Tensor merged_weight(const LoraLayer& layer, const LoraAdapter& adapter);

}  // namespace reprise::detail
