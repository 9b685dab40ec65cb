#include "models/script_tensors.h"

#include "base/text_check.h"

#include <c10/util/Exception.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/serialization/import.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <sstream>

namespace reprise::detail {
namespace {

namespace jit = torch::jit;

void visit(const jit::Block& block,
           const std::function<void(const jit::Node&)>& visitor) {
  for (const jit::Node* node : block.nodes()) {
    visitor(*node);
    for (const jit::Block* inner : node->blocks()) visit(*inner, visitor);
  }
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

/// Name of the class of a value; empty if it is not an object.
std::string class_of(const jit::Value& value) {
  const auto type = value.type()->cast<c10::ClassType>();
  return type && type->name() ? type->name()->qualifiedName() : "";
}

/// Returns the attributes to which the code assigns, as "class attribute".
std::set<std::string> assigned_attributes(const jit::Module& root,
                                          const std::string& name) {
  std::set<std::string> assigned;
  std::set<std::string> seen;
  for (const jit::Module& module : root.modules()) {
    if (!seen.insert(module.type()->name()->qualifiedName()).second) continue;
    for (const jit::Method& method : module.get_methods()) {
      visit(*method.graph()->block(), [&](const jit::Node& node) {
        if (node.kind() == c10::prim::SetAttr) {
          assigned.insert(class_of(*node.input(0)) + " " +
                          node.s(c10::attr::name));
        }
        TORCH_CHECK(
            node.kind() != c10::prim::Enter ||
                class_of(*node.input(0)).find("autocast") == std::string::npos,
            "[script '", name,
            "'] expected no `with torch.autocast` block, got"
            " one in ",
            method.name(),
            "(); remove it, and set the precision of the training instead");
      });
    }
  }
  return assigned;
}

}  // namespace

jit::Module load_script(const std::string& path) {
  std::error_code ignored;  // of a name that is too long
  TORCH_CHECK(std::filesystem::is_regular_file(path, ignored),
              "[script] expected a TorchScript file, but there is no file ",
              shortened(path));
  try {
    return jit::load(path, torch::Device(torch::kCPU));
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "[script] ", path,
                ": expected a file written by torch.jit.save(): ",
                first_line(error.what()));
  }
}

std::vector<ScriptTensor> script_tensors(const jit::Module& root,
                                         const std::string& name) {
  const auto assigned = assigned_attributes(root, name);
  std::vector<ScriptTensor> list;
  for (const auto& [path, module] : root.named_modules()) {
    const auto add = [&, &path = path, &module = module](
                         const std::string& attribute,
                         const torch::Tensor& tensor, bool parameter) {
      if (!tensor.defined()) return;
      list.push_back(
          {.name = path.empty() ? attribute : path + "." + attribute,
           .owner = module._ivalue(),
           .slot = module.type()->getAttributeSlot(attribute),
           .parameter = parameter,
           .assigned = assigned.count(module.type()->name()->qualifiedName() +
                                      " " + attribute) > 0});
      TORCH_CHECK(!parameter || !list.back().assigned, "[script '", name,
                  "'] expected that optimizers alone change parameters, but "
                  "the code assigns to '",
                  list.back().name, "'; make it a buffer");
    };
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      add(item.name, item.value, true);
    }
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      add(item.name, item.value, false);
    }
  }
  return list;
}

void register_dotted(torch::nn::Module& root, const std::string& name,
                     const torch::Tensor& tensor, bool parameter) {
  const size_t dot = name.find('.');
  if (dot != std::string::npos) {
    const std::string first = name.substr(0, dot);
    const auto children = root.named_children();
    const auto* child = children.find(first);
    const auto next =
        child != nullptr
            ? *child
            : root.register_module(first,
                                   std::make_shared<torch::nn::Module>(first));
    register_dotted(*next, name.substr(dot + 1), tensor, parameter);
  } else if (parameter) {
    root.register_parameter(name, tensor, tensor.requires_grad());
  } else {
    root.register_buffer(name, tensor);
  }
}

std::string describe_script(const jit::Module& root) {
  std::ostringstream text;
  for (const auto& [path, module] : root.named_modules()) {
    text << path << ": " << module.type()->name()->qualifiedName() << "\n";
    for (const auto& [name, value] :
         module.named_attributes(/*recurse=*/false)) {
      if (value.isObject() || name == "training") continue;
      text << name << " = ";
      if (value.isTensor() && value.toTensor().defined()) {
        const auto tensor = value.toTensor();
        text << tensor.scalar_type() << tensor.sizes()
             << tensor.requires_grad();
      } else {
        text << value;
      }
      text << "\n";
    }
    for (const jit::Method& method : module.get_methods()) {
      text << method.name() << method.graph()->toString(false);
    }
  }
  return text.str();
}

}  // namespace reprise::detail
