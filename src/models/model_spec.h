#pragma once

#include <reprise/models/model.h>

#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

/// What a family of models defines. Each family is one source that defines
/// `std::vector<ModelSpec> <family>_models()` and is listed in CMakeLists.txt.
/// Tested by tests/models/zoo_test.cpp.
namespace reprise::detail {

/// The modules of a model, as its family builds them.
struct BuiltModel {
  std::shared_ptr<torch::nn::Module> root =
      std::make_shared<torch::nn::Module>();
  std::vector<Stage> stages{};
  /// Weights and biases passed to ops::linear() or ops::linear_cross_entropy() besides
  /// those of torch::nn::Linear modules; may be null.
  std::function<std::vector<torch::Tensor>()> linear_parameters{};
  /// Tables passed to ops::embedding() that are not among linear_parameters; may be null.
  std::function<std::vector<torch::Tensor>()> embeddings{};
  /// See Model::packed_groups; may be null.
  std::function<std::vector<std::vector<torch::Tensor>>()> packed_groups{};
};

/// Builds the model `name`. `options` are resolved: all that the model uses are set.
using ModelBuilder = BuiltModel (*)(const std::string& name,
                                    const ModelOptions& options);

/// How the weight files of a family vary.
struct WeightNames {
  std::string body_prefix{};  ///< may be missing from names
  std::string head_prefix =
      "head.";  ///< tensors that may be missing altogether
  /// Second names of tensors, which may be stored twice or under this name only.
  std::map<std::string, std::string> tied{};
  /// Prefixes of tensors to ignore: heads of other tasks on the same body.
  std::vector<std::string> foreign_prefixes{};
};

/// One model of a family.
struct ModelSpec {
  std::string name;
  std::string description;
  Task task;
  /// Options that are zero, empty or negative here do not apply to the model.
  ModelOptions defaults;
  ModelBuilder build;
  WeightNames weights{};
};

/// All models, in the order of the families.
const std::vector<ModelSpec>& model_specs();

/// Null if there is no such model.
const ModelSpec* find_model_spec(std::string_view name);

/// Defaults of an image classifier. `width` 0: the model has no such option.
ModelOptions image_options(int64_t size, int64_t channels, int64_t classes,
                           int64_t width = 0);

}  // namespace reprise::detail
