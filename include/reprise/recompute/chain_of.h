#pragma once

#include <reprise/recompute/chain.h>

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

namespace reprise {

/// One element of the list that chain_of() takes: a pattern of module names, a
/// named function, or a stage.
class ChainPart {
 public:
  /// Names of modules as in `named_modules()`. A component "*" matches any
  /// component: "layers.*" gives one stage per entry of `layers`.
  ChainPart(std::string pattern) : part_(std::move(pattern)) {}
  ChainPart(const char* pattern) : part_(std::string(pattern)) {}

  /// A function between or after the modules, such as a reshape or a loss, that
  /// takes and returns what make_stage() accepts. `modules` are the modules
  /// that it uses.
  template <class F>
  requires(!std::convertible_to<F, std::string>)  //
      ChainPart(std::string name, F function, Modules modules = {})
      : ChainPart(make_stage(std::move(name), std::move(function),
                             std::move(modules))) {
    if (detail::tensors_taken<F>() == 1) part_ = stage()->on_first();
  }

  /// A stage that is used as it is.
  ChainPart(Stage stage) : part_(std::move(stage)) {}

  /// Each returns null if the part is of the other kind.
  const std::string* pattern() const { return std::get_if<0>(&part_); }
  const Stage* stage() const { return std::get_if<1>(&part_); }

 private:
  std::variant<std::string, Stage> part_;
};

struct ChainOfOptions {
  /// Allow parameters of the model that belong to no stage. The chain does not
  /// train them, and Chain::parameters() does not contain them.
  bool allow_unused_parameters = false;
};

namespace detail {

/// How to make a stage of a module of one type.
struct ModuleType {
  const std::type_info* type;
  /// Whether `make` accepts modules of derived types.
  bool is_base;
  /// Returns the stage, or nothing if the module is not of the type.
  std::vector<Stage> (*make)(const std::string& name,
                             const std::shared_ptr<torch::nn::Module>& module);
};

template <class T>
struct ImplOf {
  using type = T;
};
template <class T>
requires requires {
  typename T::ContainedType;
}
struct ImplOf<T> {
  using type = typename T::ContainedType;
};

/// `T` is a module or its holder.
template <class T>
ModuleType module_type() {
  using Impl = typename ImplOf<T>::type;
  static_assert(std::is_base_of_v<torch::nn::Module, Impl>,
                "chain_of() expects types of modules");
  return {&typeid(Impl), std::is_abstract_v<Impl>,
          [](const std::string& name,
             const std::shared_ptr<torch::nn::Module>& module) {
            std::vector<Stage> made;
            if (auto held = std::dynamic_pointer_cast<Impl>(module)) {
              Stage stage = make_stage(name, std::move(held));
              made.push_back(stage.takes() == 1 ? stage.on_first() : stage);
            }
            return made;
          }};
}

Chain chain_of(const torch::nn::Module& model,
               const std::vector<ChainPart>& parts,
               const std::vector<ModuleType>& types,
               const ChainOfOptions& options);

}  // namespace detail

/// Returns a chain of the modules of `model` that `parts` name, in the order of
/// `parts`, for a model whose forward applies them one after another. Modules
/// that one pattern matches are in the order of their registration. The stages
/// have the names of the modules and share them with `model`.
///
///     Chain chain = chain_of<BlockImpl>(*model, {"embed", "layers.*", "head",
///         {"loss", [](Tensor x, Tensor y) { return loss_sum(x, y); }}});
///
/// Modules in C++ have no virtual `forward`, so `Types` lists the module types
/// of the caller, as Impl types or as holders. LibTorch's layers with a forward
/// of tensors are known. A module must have exactly one of these types, or be
/// derived from a listed type that is abstract, whose `forward` must then be
/// virtual. Its `forward` takes and returns what make_stage() accepts; of
/// several overloads and default arguments, the one with the fewest tensors is
/// used. If it, or a function in `parts`, takes one tensor and the chain
/// carries more, such as targets, the others are passed on behind its outputs
/// (Stage::on_first()).
///
/// Throws c10::Error if a pattern matches no module or a module that is
/// already in the chain by itself or within another, if a module's type is not
/// known, and if a parameter of `model` belongs to no stage. Whether stages
/// compose shows when the chain runs; check_chain() tests it.
template <class... Types>
Chain chain_of(const torch::nn::Module& model,
               const std::vector<ChainPart>& parts,
               const ChainOfOptions& options = {}) {
  return detail::chain_of(model, parts, {detail::module_type<Types>()...},
                          options);
}

}  // namespace reprise
