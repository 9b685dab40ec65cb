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

/// The tensors that are passed from one stage to the next.
using Tensors = std::vector<torch::Tensor>;
using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

/// One step of a model, and the unit that is kept or recomputed. Maps a list of
/// tensors to a list of tensors. A stage may use random numbers and update the
/// buffers of its modules. It must otherwise be a deterministic function of its
/// inputs, and must not modify them in place.
class Stage {
 public:
  using Function = std::function<Tensors(const Tensors&)>;

  /// `modules` are the modules that `function` uses. Their buffers are restored
  /// after a recomputation, and their parameters are part of
  /// Chain::parameters(). `takes` is the number of tensors that `function`
  /// takes, or 0 if it takes lists of any length. Throws c10::Error if
  /// `function` is empty, a module is null or `takes` is negative.
  Stage(std::string name, Function function, Modules modules = {},
        int takes = 0);

  const std::string& name() const { return name_; }
  const Modules& modules() const { return modules_; }
  int takes() const { return takes_; }  ///< as given to the constructor
  Tensors operator()(const Tensors& inputs) const { return function_(inputs); }

  /// An alternative function on the same modules with the same outputs and
  /// gradients, which saves less for the backward pass or runs faster. An
  /// example is the stage's own function wrapped in checkpoint().
  struct Variant {
    std::string name;
    Function function;
  };
  /// Returns a copy with one more variant. Schedules refer to variants by
  /// number, counted from 1 in the order of these calls; see Op::variant.
  Stage with_variant(std::string name, Function function) const;
  const std::vector<Variant>& variants() const { return variants_; }

  /// Returns the stage's own function for 0, else that of `variants()[variant -
  /// 1]`. Throws std::out_of_range if there is no such variant.
  const Function& function(int variant = 0) const {
    if (variant == 0) return function_;
    return variants_.at(static_cast<size_t>(variant) - 1).function;
  }

  /// Returns a copy labelled with `kind`. Stages of one kind run the same code
  /// on parameters of their own. Those whose inputs and parameters have equal
  /// shapes are assumed to have equal costs, so measure_stage_costs() measures
  /// only two of them.
  Stage of_kind(std::string kind) const;
  const std::string& kind() const { return kind_; }  ///< empty if it has none

  /// Returns a stage that applies this one, or its variants, to the first
  /// tensor and passes all others through unchanged. For plain layers in a
  /// chain that also carries masks or skip connections.
  Stage on_first() const;

 private:
  std::string name_;
  Function function_;
  Modules modules_;
  std::vector<Variant> variants_;
  std::string kind_;
  int takes_ = 0;
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
              "; Stage::on_first() passes additional tensors through");
}

template <class M>
concept ModuleHolder = requires(M holder) {
  { holder.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
};

template <class M>
concept ModulePointer =
    std::is_convertible_v<M, std::shared_ptr<torch::nn::Module>>;

/// Wraps a module holder or a pointer to a module in a callable. The call
/// operator of module holders does not work for a Sequential.
template <class M>
struct CallForward {
  M module;
  template <class... T>
  requires requires(M m, T... t) { m->forward(t...); }
  auto operator()(const T&... inputs) { return module->forward(inputs...); }
};

/// The number of tensors that a module or callable takes, 1 to 3; 0 if it takes
/// a list.
template <class F>
constexpr int tensors_taken() {
  using T = const torch::Tensor&;
  if constexpr (ModulePointer<F> || ModuleHolder<F>) {
    return tensors_taken<CallForward<F>>();
  } else if constexpr (std::is_invocable_v<F&, T>) {
    return 1;
  } else if constexpr (std::is_invocable_v<F&, const Tensors&>) {
    return 0;
  } else if constexpr (std::is_invocable_v<F&, T, T>) {
    return 2;
  } else {
    static_assert(std::is_invocable_v<F&, T, T, T>,
                  "a stage takes one to three tensors, or one list of them");
    return 3;
  }
}

template <class F>
Stage::Function adapt(const std::string& name, F function) {
  constexpr int kTaken = tensors_taken<F>();
  if constexpr (ModulePointer<F> || ModuleHolder<F>) {
    return adapt(name, CallForward<F>{std::move(function)});
  } else if constexpr (kTaken == 0) {
    return [function](const Tensors& in) mutable {
      return to_tensors(function(in));
    };
  } else {
    return [name, function](const Tensors& in) mutable {
      check_count<kTaken>(name, in);
      return [&]<size_t... I>(std::index_sequence<I...>) {
        return to_tensors(function(in[I]...));
      }
      (std::make_index_sequence<kTaken>{});
    };
  }
}

}  // namespace detail

/// Creates a stage from a module (a holder or shared_ptr with a `forward`
/// method) or from a callable. The callable takes one to three tensors or a
/// list of tensors, and returns a tensor, a tuple or a list. Modules that a
/// lambda uses must be listed in `modules`. The stage throws c10::Error if it
/// is called with another number of tensors.
template <class F>
Stage make_stage(std::string name, F function, Modules modules = {}) {
  if constexpr (detail::ModuleHolder<F>) {
    modules.push_back(function.ptr());
  } else if constexpr (detail::ModulePointer<F>) {
    modules.push_back(function);
  }
  auto adapted = detail::adapt(name, std::move(function));
  return Stage(std::move(name), std::move(adapted), std::move(modules),
               detail::tensors_taken<F>());
}

}  // namespace reprise
