// Tested by tests/recompute/chain_test.cpp.
#include <reprise/recompute/stage.h>

namespace reprise {

Stage::Stage(std::string name, Function function, Modules modules, int takes)
    : name_(std::move(name)),
      function_(std::move(function)),
      modules_(std::move(modules)),
      takes_(takes) {
  TORCH_CHECK(function_, "[stage '", name_, "'] expected a function, got none");
  for (const auto& module : modules_) {
    TORCH_CHECK(module, "[stage '", name_, "'] expected modules, got a null");
  }
  TORCH_CHECK(takes_ >= 0, "[stage '", name_,
              "'] expected the number of tensors that it takes, or 0 for any, "
              "got ",
              takes_);
}

Stage Stage::with_variant(std::string name, Function function) const {
  TORCH_CHECK(function, "[stage '", name_,
              "'] expected a function for variant '", name, "', got none");
  Stage stage = *this;
  stage.variants_.push_back({std::move(name), std::move(function)});
  return stage;
}

Stage Stage::of_kind(std::string kind) const {
  Stage stage = *this;
  stage.kind_ = std::move(kind);
  return stage;
}

Stage Stage::on_first() const {
  const auto first_only = [this](const Function& function) -> Function {
    return [name = name_, function](const Tensors& inputs) {
      TORCH_CHECK(!inputs.empty(), "[stage '", name,
                  "'] expected at least one tensor, got none");
      Tensors outputs = function({inputs[0]});
      outputs.insert(outputs.end(), inputs.begin() + 1, inputs.end());
      return outputs;
    };
  };
  Stage stage(name_, first_only(function_), modules_);
  for (const Variant& variant : variants_) {
    stage.variants_.push_back({variant.name, first_only(variant.function)});
  }
  stage.kind_ = kind_;
  return stage;
}

}  // namespace reprise
