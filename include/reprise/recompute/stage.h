#pragma once

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace reprise {

/// The tensors that travel from one stage to the next.
using Tensors = std::vector<torch::Tensor>;
using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

/// One step of a model: the unit that is kept or recomputed. Maps a list of
/// tensors to a list of tensors. May use random numbers and update buffers of
/// `modules`; must otherwise do the same on the same inputs, and must not
/// change its inputs in place.
class Stage {
 public:
  using Function = std::function<Tensors(const Tensors&)>;

  /// `modules`: those the function uses. Their buffers are protected when the
  /// stage is recomputed, and they make up `Chain::parameters()`.
  Stage(std::string name, Function function, Modules modules = {});

  const std::string& name() const { return name_; }
  const Modules& modules() const { return modules_; }
  Tensors operator()(const Tensors& inputs) const { return function_(inputs); }

  /// Another function for the same: same outputs and gradients, on the same
  /// modules, but it keeps less for the backward or runs faster. Example: the
  /// stage's own function inside checkpoint().
  struct Variant {
    std::string name;
    Function function;
  };
  /// A copy with one variant more. A schedule names variants from 1 on, in the
  /// order of these calls; see Op::variant.
  Stage with_variant(std::string name, Function function) const;
  const std::vector<Variant>& variants() const { return variants_; }

  /// The stage itself for 0, else `variants()[variant - 1]`.
  const Function& function(int variant = 0) const {
    if (variant == 0) return function_;
    return variants_.at(static_cast<size_t>(variant) - 1).function;
  }

  /// A copy that is said to be of a kind: stages of one kind do the same, each with
  /// parameters of its own, so that where inputs and parameters have the same
  /// shapes they cost the same. Planning measures two of them, not all.
  Stage of_kind(std::string kind) const;
  const std::string& kind() const { return kind_; }  ///< empty: of none

  /// This stage applied to the first tensor, with all others handed on: how a
  /// plain layer stands in a chain that carries masks or skip connections. Its
  /// variants likewise.
  Stage on_first() const;

 private:
  std::string name_;
  Function function_;
  Modules modules_;
  std::vector<Variant> variants_;
  std::string kind_;
};

namespace detail {

template <class T>
Tensors to_tensors(T&& result) {
  using Plain = std::decay_t<T>;
  if constexpr (std::is_convertible_v<Plain, Tensors>) {
    return std::forward<T>(result);
  } else if constexpr (std::is_convertible_v<Plain, torch::Tensor>) {
    return {torch::Tensor(std::forward<T>(result))};
  } else {
    return std::apply(
        [](auto&&... tensors) { return Tensors{torch::Tensor(tensors)...}; },
        std::forward<T>(result));
  }
}

template <size_t N>
void check_count(const std::string& stage, const Tensors& inputs) {
  TORCH_CHECK(inputs.size() == N, "[stage '", stage, "'] expected ", N,
              " tensor", N == 1 ? "" : "s", ", got ", inputs.size(),
              "; Stage::on_first() hands the others on");
}

template <class M>
concept ModuleHolder = requires(M holder) {
  { holder.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
};

template <class M>
concept ModulePointer =
    std::is_convertible_v<M, std::shared_ptr<torch::nn::Module>>;

/// Makes a callable of a holder of, or pointer to, a module. (The call operator
/// that holders have is of no use for a Sequential.)
template <class M>
struct CallForward {
  M module;
  template <class... T>
  requires requires(M m, T... t) { m->forward(t...); }
  auto operator()(const T&... inputs) { return module->forward(inputs...); }
};

template <class F>
Stage::Function adapt(const std::string& name, F function) {
  using T = const torch::Tensor&;
  if constexpr (ModulePointer<F> || ModuleHolder<F>) {
    return adapt(name, CallForward<F>{std::move(function)});
  } else if constexpr (std::is_invocable_v<F&, T>) {
    return [name, function](const Tensors& in) mutable {
      check_count<1>(name, in);
      return to_tensors(function(in[0]));
    };
  } else if constexpr (std::is_invocable_v<F&, const Tensors&>) {
    return [function](const Tensors& in) mutable {
      return to_tensors(function(in));
    };
  } else if constexpr (std::is_invocable_v<F&, T, T>) {
    return [name, function](const Tensors& in) mutable {
      check_count<2>(name, in);
      return to_tensors(function(in[0], in[1]));
    };
  } else {
    static_assert(std::is_invocable_v<F&, T, T, T>,
                  "a stage takes one to three tensors, or one list of them");
    return [name, function](const Tensors& in) mutable {
      check_count<3>(name, in);
      return to_tensors(function(in[0], in[1], in[2]));
    };
  }
}

}  // namespace detail

/// A stage from a module (holder or shared_ptr, with a `forward`) or from any
/// callable on one to three tensors or a list of them, that returns a tensor, a
/// tuple or a list. The modules a lambda uses are to be named in `modules`.
template <class F>
Stage make_stage(std::string name, F function, Modules modules = {}) {
  if constexpr (detail::ModuleHolder<F>) {
    modules.push_back(function.ptr());
  } else if constexpr (detail::ModulePointer<F>) {
    modules.push_back(function);
  }
  auto adapted = detail::adapt(name, std::move(function));
  return Stage(std::move(name), std::move(adapted), std::move(modules));
}

}  // namespace reprise
