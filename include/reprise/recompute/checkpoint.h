#pragma once

#include <reprise/recompute/stage.h>

#include <ATen/core/Generator.h>

#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

namespace reprise {

struct CheckpointOptions {
  /// Modules the function uses: their buffers (BatchNorm's statistics) change
  /// on the first run only. Inside a Stage, the stage's own unless named here.
  Modules modules{};
  /// Generators it draws from besides LibTorch's default ones.
  std::vector<at::Generator> generators{};
  /// Stop the recomputation as soon as the last tensor needed is there.
  bool early_stop = true;
};

/// Whether this thread is recomputing a stage or a checkpointed function. For code with
/// side effects that should happen once, such as logging or counters.
bool is_recomputing();

/// Runs `function(inputs)` and keeps its inputs only; what its backward needs
/// is recomputed when the backward asks for it. The result is part of the
/// caller's graph like any other: it works under `backward()` and
/// `autograd::grad`, with several inputs and outputs, with inputs that need no
/// gradient, nested, and for second derivatives. Gradients are those of a plain
/// call, on the CPU to the bit.
///
/// `function` is called once now and once or more later, perhaps on a thread of
/// autograd; whatever it captures must live until the graph is gone. It must
/// not change its inputs in place. Without grad mode this is a plain call.
Tensors checkpoint_list(std::function<Tensors(const Tensors&)> function,
                        const Tensors& inputs,
                        const CheckpointOptions& options = {});

namespace detail {

template <class R>
R from_tensors(Tensors&& outputs) {
  if constexpr (std::is_same_v<R, Tensors>) {
    return std::move(outputs);
  } else if constexpr (std::is_same_v<R, torch::Tensor>) {
    return std::move(outputs[0]);
  } else {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return R{std::move(outputs[I])...};
    }
    (std::make_index_sequence<std::tuple_size_v<R>>{});
  }
}

template <class F, size_t... I>
auto call_with(F& function, const Tensors& inputs, std::index_sequence<I...>) {
  return function(inputs[I]...);
}

template <class T>
concept IsTensor = std::is_convertible_v<T, torch::Tensor>;

}  // namespace detail

/// checkpoint_list() for a function (or module) on single tensors:
///
///     auto y = checkpoint(block, x);      // a module
///     auto z = checkpoint(attend, a, b);  // attend(a, b), any callable
///
/// Returns what the function returns: a tensor, a tuple or a list of them.
template <class F, detail::IsTensor... T>
auto checkpoint_with(CheckpointOptions options, F function,
                     const T&... inputs) {
  if constexpr (detail::ModuleHolder<F>) {
    options.modules.push_back(function.ptr());
    return checkpoint_with(std::move(options),
                           detail::CallForward<F>{std::move(function)},
                           inputs...);
  } else if constexpr (detail::ModulePointer<F>) {
    options.modules.push_back(function);
    return checkpoint_with(std::move(options),
                           detail::CallForward<F>{std::move(function)},
                           inputs...);
  } else {
    constexpr auto kIndices = std::make_index_sequence<sizeof...(T)>{};
    using Result = std::decay_t<decltype(detail::call_with(
        function, std::declval<const Tensors&>(), kIndices))>;
    Tensors outputs = checkpoint_list(
        [function](const Tensors& list) mutable {
          return detail::to_tensors(
              detail::call_with(function, list, decltype(kIndices){}));
        },
        Tensors{torch::Tensor(inputs)...}, options);
    return detail::from_tensors<Result>(std::move(outputs));
  }
}

template <class F, detail::IsTensor... T>
auto checkpoint(F function, const T&... inputs) {
  return checkpoint_with(CheckpointOptions{}, std::move(function), inputs...);
}

}  // namespace reprise
