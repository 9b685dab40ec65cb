#include <reprise/recompute/stage.h>

namespace reprise {

Stage::Stage(std::string name, Function function, Modules modules)
    : name_(std::move(name)),
      function_(std::move(function)),
      modules_(std::move(modules)) {
  TORCH_CHECK(function_, "[stage '", name_, "'] expected a function, got none");
  for (const auto& module : modules_) {
    TORCH_CHECK(module, "[stage '", name_, "'] expected modules, got a null");
  }
}

Stage Stage::on_first() const {
  Function function = function_;
  return Stage(
      name_,
      [name = name_, function](const Tensors& inputs) {
        TORCH_CHECK(!inputs.empty(), "[stage '", name,
                    "'] expected at least one tensor, got none");
        Tensors outputs = function({inputs[0]});
        outputs.insert(outputs.end(), inputs.begin() + 1, inputs.end());
        return outputs;
      },
      modules_);
}

}  // namespace reprise
