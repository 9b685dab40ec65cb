#include "compat/script_executor.h"
#include "models/script_tensors.h"

#include <reprise/models/script.h>

#include <c10/util/Exception.h>
#include <torch/utils.h>

#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace reprise {
namespace {

using detail::ScriptTensor;
using torch::Tensor;

/// Gives the script copies of the buffers to which it assigns, and takes their values back
/// afterwards. The tensors that the module has registered stay the same, and autograd graphs
/// that saved the old value stay valid.
class AssignedBuffers {
 public:
  explicit AssignedBuffers(const std::vector<ScriptTensor>& buffers)
      : buffers_(buffers) {
    for (const auto& buffer : buffers_) registered_.push_back(buffer.get());
    const torch::NoGradGuard no_grad;
    for (const auto& tensor : registered_) copies_.push_back(tensor.clone());
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].set(copies_[i]);
  }

  void take_values(const std::string& script) {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < buffers_.size(); ++i) {
      const Tensor value = buffers_[i].get();
      if (value.is_same(copies_[i]) && value._version() == 0) continue;
      Tensor& own = registered_[i];
      TORCH_CHECK(value.sizes() == own.sizes() &&
                      value.scalar_type() == own.scalar_type(),
                  "[script '", script, "'] expected that '", buffers_[i].name,
                  "' keeps its type and shape ", own.scalar_type(), own.sizes(),
                  ", but the code assigned ", value.scalar_type(),
                  value.sizes());
      own.copy_(value);
    }
  }

  ~AssignedBuffers() {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      buffers_[i].set(registered_[i]);
    }
  }
  AssignedBuffers(const AssignedBuffers&) = delete;
  AssignedBuffers& operator=(const AssignedBuffers&) = delete;

 private:
  const std::vector<ScriptTensor>& buffers_;
  std::vector<Tensor> registered_;
  std::vector<Tensor> copies_;
};

Tensors to_tensors(const c10::IValue& value, const std::string& script) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  Tensors list;
  bool all = value.isTuple();
  if (all) {
    for (const c10::IValue& element : value.toTuple()->elements()) {
      all = all && element.isTensor();
      if (all) list.push_back(element.toTensor());
    }
  }
  TORCH_CHECK(all, "[script '", script,
              "'] expected that forward() returns a tensor, or a tuple or list "
              "of tensors, got ",
              value.type()->repr_str());
  return list;
}

}  // namespace

struct ScriptModule::Impl {
  struct Script {
    torch::jit::Module module;
    std::vector<ScriptTensor> tensors;
    std::vector<ScriptTensor> assigned{};  // those of `tensors`
    int required = 0, most = 0;            // arguments of forward()
  };

  static Script make(const torch::jit::Module& module,
                     const std::string& name) {
    TORCH_CHECK(module.find_method("forward"), "[script '", name,
                "'] expected a module with a method forward(), got none");
    Script script{module, detail::script_tensors(module, name)};
    for (const auto& tensor : script.tensors) {
      if (tensor.assigned) script.assigned.push_back(tensor);
    }
    const auto& schema = module.get_method("forward").function().getSchema();
    for (const auto& argument : schema.arguments()) {
      ++script.most;
      if (!argument.default_value()) ++script.required;
    }
    --script.most;  // `self`
    --script.required;
    return script;
  }

  std::string name;
  Script training;
  std::optional<Script> evaluation{};
};

ScriptModule::ScriptModule(const torch::jit::Module& module, std::string name)
    : torch::nn::Module(name) {
  compat::keep_exceptions_of_scripts();
  Impl::Script training = Impl::make(module, name);
  impl_ =
      std::make_shared<Impl>(Impl{std::move(name), std::move(training), {}});
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : impl_->training.tensors) {
    const Tensor tensor = item.get();
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    detail::register_dotted(*this, item.name, tensor, item.parameter);
  }
  ScriptModule::train(true);
}

ScriptModule::ScriptModule(const torch::jit::Module& module,
                           const torch::jit::Module& evaluation,
                           std::string name)
    : ScriptModule(module, std::move(name)) {
  std::map<std::string, Tensor> own;
  for (const auto& item : impl_->training.tensors) own[item.name] = item.get();
  Impl::Script script = Impl::make(evaluation, impl_->name);
  for (const auto& item : script.tensors) {
    const auto found = own.find(item.name);
    TORCH_CHECK(found != own.end(), "[script '", impl_->name,
                "'] expected the same tensors for training and evaluation, but "
                "only the latter has '",
                item.name, "'");
    const Tensor other = item.get();
    TORCH_CHECK(found->second.sizes() == other.sizes() &&
                    found->second.scalar_type() == other.scalar_type(),
                "[script '", impl_->name, "'] expected '", item.name, "' as ",
                found->second.scalar_type(), found->second.sizes(),
                " in evaluation too, got ", other.scalar_type(), other.sizes());
    item.set(found->second);
  }
  impl_->evaluation = std::move(script);
  ScriptModule::train(true);
}

Tensors ScriptModule::forward(const Tensors& inputs) {
  auto& script = is_training() || !impl_->evaluation ? impl_->training
                                                     : *impl_->evaluation;
  const auto count = static_cast<int>(inputs.size());
  TORCH_CHECK(script.required <= count && count <= script.most, "[script '",
              impl_->name, "'] expected ", script.required,
              script.most > script.required
                  ? " to " + std::to_string(script.most)
                  : std::string(),
              " tensors, as its forward() takes, got ", count);
  std::vector<c10::IValue> arguments(inputs.begin(), inputs.end());
  AssignedBuffers assigned(script.assigned);
  c10::IValue result;
  try {
    const compat::PlainScriptGuard plain;
    result = script.module.forward(std::move(arguments));
  } catch (c10::Error& error) {
    error.add_context("in script '" + impl_->name + "'");
    throw;
  }
  assigned.take_values(impl_->name);
  return to_tensors(result, impl_->name);
}

void ScriptModule::train(bool on) {
  torch::nn::Module::train(on);
  impl_->training.module.train(on);
  if (impl_->evaluation) impl_->evaluation->module.train(on);
}

int ScriptModule::required_inputs() const {
  return impl_->training.required;
}

int ScriptModule::most_inputs() const {
  return impl_->training.most;
}

std::shared_ptr<ScriptModule> load_script_module(const std::string& path) {
  const auto name = std::filesystem::path(path).filename().string();
  return std::make_shared<ScriptModule>(detail::load_script(path), name);
}

}  // namespace reprise
