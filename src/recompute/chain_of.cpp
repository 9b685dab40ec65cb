#include "base/nearest.h"
#include "recompute/known_modules.h"

#include <reprise/recompute/chain_of.h>

#include <fmt/format.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>

namespace reprise::detail {
namespace {

using torch::nn::Module;
using NamedModules = torch::OrderedDict<std::string, std::shared_ptr<Module>>;

/// Compares component by component; "*" matches any one.
bool matches(std::string_view pattern, std::string_view name) {
  while (true) {
    const size_t p = pattern.find('.');
    const size_t n = name.find('.');
    const std::string_view wanted = pattern.substr(0, p);
    if (wanted != "*" && wanted != name.substr(0, n)) return false;
    constexpr size_t kLast = std::string_view::npos;
    if (p == kLast || n == kLast) return p == n;
    pattern.remove_prefix(p + 1);
    name.remove_prefix(n + 1);
  }
}

/// Returns whether module `name` is inside of module `outer`.
bool is_inside(const std::string& name, const std::string& outer) {
  return name.starts_with(outer + ".");
}

[[noreturn]] void report_no_match(const std::string& pattern,
                                  const NamedModules& modules) {
  const bool is_name = pattern.find('*') == std::string::npos;
  TORCH_CHECK(is_name, "[chain_of] expected a pattern that matches modules, ",
              "got '", pattern,
              "', which matches none; '*' stands for one component of a name, "
              "as in 'layers.*'");
  std::string names;
  if (nearest(pattern, modules.keys()).empty()) {
    names = "; the model's modules are";
    constexpr size_t kMostNames = 8;
    for (size_t i = 0; i < std::min(kMostNames, modules.size()); ++i) {
      names += fmt::format("{} '{}'", i == 0 ? "" : ",", modules[i].key());
    }
    if (modules.size() > kMostNames) names += ", …";
    if (modules.is_empty()) names = "; the model has no modules";
  }
  TORCH_CHECK(false, "[chain_of] expected the name of a module, got '", pattern,
              "'", did_you_mean(pattern, modules.keys()), names);
}

[[noreturn]] void report_unknown_type(const std::string& name,
                                      const Module& module) {
  TORCH_CHECK(
      dynamic_cast<const torch::nn::ModuleListImpl*>(&module) == nullptr &&
          dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) == nullptr,
      "[chain_of] expected a module with a forward, got '", name, "' of type ",
      module.name(), "; its entries are '", name, ".*'");
  TORCH_CHECK(false, "[chain_of] expected a known type for module '", name,
              "', got ", module.name(),
              "; add it to the template arguments: chain_of<", module.name(),
              ">(…)");
}

Stage make_module_stage(const std::string& name,
                        const std::shared_ptr<Module>& module,
                        const std::vector<ModuleType>& types) {
  const Module& object = *module;
  // A derived type may hide the forward of its base, so a base is only used if
  // nothing else is listed, and only if it is abstract.
  for (const auto* list : {&libtorch_modules(), &types}) {
    for (const ModuleType& type : *list) {
      if (*type.type == typeid(object)) return type.make(name, module).at(0);
    }
  }
  for (const ModuleType& type : types) {
    if (!type.is_base) continue;
    auto made = type.make(name, module);
    if (!made.empty()) return std::move(made[0]);
  }
  report_unknown_type(name, object);
}

/// Fails if module `name` or a part of it is in the chain already.
void check_not_taken(const std::string& name,
                     const std::vector<std::string>& taken) {
  for (const std::string& other : taken) {
    const std::string advice =
        "; remove one of them, or add a function that calls the module if the "
        "model runs it twice";
    TORCH_CHECK(name != other, "[chain_of] expected each module once, got '",
                name, "' twice", advice);
    const bool inside = is_inside(name, other);
    TORCH_CHECK(!inside && !is_inside(other, name),
                "[chain_of] expected each module once, got '",
                inside ? name : other, "' also as a part of '",
                inside ? other : name, "'", advice);
  }
}

void check_all_parameters(const Module& model,
                          const std::vector<Stage>& stages) {
  std::unordered_set<const void*> known;
  for (const Stage& stage : stages) {
    for (const auto& module : stage.modules()) {
      for (const auto& parameter : module->parameters()) {
        known.insert(parameter.unsafeGetTensorImpl());
      }
    }
  }
  constexpr size_t kMostNames = 3;
  std::string names;
  size_t unused = 0;
  for (const auto& item : model.named_parameters()) {
    if (known.count(item.value().unsafeGetTensorImpl()) != 0) continue;
    if (++unused > kMostNames) continue;
    names += fmt::format("{}'{}'", unused == 1 ? "" : ", ", item.key());
  }
  if (unused > kMostNames) {
    names += fmt::format(" and {} more", unused - kMostNames);
  }
  TORCH_CHECK(unused == 0,
              "[chain_of] expected a stage for every parameter of the model, "
              "got none for ",
              names,
              "; the chain would not train them: name their modules, list "
              "them among the modules of a function, or set "
              "allow_unused_parameters");
}

}  // namespace

Chain chain_of(const Module& model, const std::vector<ChainPart>& parts,
               const std::vector<ModuleType>& types,
               const ChainOfOptions& options) {
  // Without the model itself, which need not be owned by a shared_ptr.
  const NamedModules modules =
      model.named_modules(/*name_prefix=*/{}, /*include_self=*/false);
  std::vector<Stage> stages;
  std::vector<std::string> taken;
  for (const ChainPart& part : parts) {
    if (part.stage() != nullptr) {
      stages.push_back(*part.stage());
      continue;
    }
    const size_t before = stages.size();
    for (const auto& item : modules) {
      if (!matches(*part.pattern(), item.key())) continue;
      check_not_taken(item.key(), taken);
      taken.push_back(item.key());
      stages.push_back(make_module_stage(item.key(), item.value(), types));
    }
    if (stages.size() == before) report_no_match(*part.pattern(), modules);
  }
  if (!options.allow_unused_parameters) check_all_parameters(model, stages);
  return Chain(std::move(stages));
}

}  // namespace reprise::detail
