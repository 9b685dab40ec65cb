#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <string>
#include <vector>

/// The tensors and the code of TorchScript modules. Tested by tests/models/script_test.cpp.
namespace reprise::detail {

/// Loads a TorchScript file into host memory. Throws c10::Error with the path if it is
/// missing or is not TorchScript.
torch::jit::Module load_script(const std::string& path);

/// A parameter or buffer of a script.
struct ScriptTensor {
  std::string name;  ///< as in Python: "layer1.0.conv1.weight"
  c10::intrusive_ptr<c10::ivalue::Object> owner;  ///< the submodule that has it
  size_t slot = 0;                                ///< of `owner`
  bool parameter = false;
  /// The script assigns to it (self.x = …) instead of changing it in place.
  bool assigned = false;

  torch::Tensor get() const { return owner->getSlot(slot).toTensor(); }
  void set(const torch::Tensor& tensor) const { owner->setSlot(slot, tensor); }
};

/// Returns the tensors of `module` and its submodules: parameters, and all other attributes
/// that are tensors. Throws c10::Error if the code assigns to a parameter or contains a
/// `with torch.autocast` block. `name` is used in errors.
std::vector<ScriptTensor> script_tensors(const torch::jit::Module& module,
                                         const std::string& name);

/// Registers `tensor` in `root` under a dotted name, in nested modules.
void register_dotted(torch::nn::Module& root, const std::string& name,
                     const torch::Tensor& tensor, bool parameter);

/// Returns a text that is equal for modules that compute the same on tensors of the same
/// shapes: code, attributes, and types and shapes of tensors, but not their values.
std::string describe_script(const torch::jit::Module& module);

}  // namespace reprise::detail
