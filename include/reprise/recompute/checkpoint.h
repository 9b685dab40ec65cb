#pragma once

#include <reprise/recompute/host_memory.h>
#include <reprise/recompute/stage.h>

#include <ATen/core/Generator.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace reprise {

struct CheckpointOptions {
  /// Modules that the function uses. Their buffers, such as BatchNorm's running
  /// statistics, are updated by the first run only. Defaults to the stage's
  /// modules if checkpoint() is called inside a Stage.
  Modules modules{};
  /// Random generators that the function uses besides LibTorch's default ones.
  std::vector<at::Generator> generators{};
  /// Stop the recomputation as soon as all tensors needed by the backward pass
  /// have been recomputed.
  bool early_stop = true;
  /// Names of the keep() and offload() calls in the function that take effect;
  /// the others are plain calls (keep.h). All of them take effect if this is not set. Every
  /// name must occur (c10::Error).
  std::optional<std::vector<std::string>> keep_names{};
  /// Store for the values of offload() calls in the function (keep.h). Null: they
  /// stay on the device, as those of keep().
  std::shared_ptr<HostStore> offload_store{};
  HostOptions offload{};
};

/// Returns whether this thread is recomputing a stage or a checkpointed
/// function. For code with side effects that should happen once, such as
/// logging or counters.
bool is_recomputing();

/// Returns whether this thread is recomputing a stage right before its backward: nothing reads
/// the values of the stage's outputs then. A stage may leave them undefined, and save a last
/// matrix product, as long as their shapes, types and autograd graph are the same. For the last
/// layer of a stage only: a block inside of a larger stage must not ask, because what follows
/// it in the stage reads its output.
bool outputs_unused();

/// Runs `function(inputs)` and saves only its inputs for the backward pass,
/// which recomputes everything else. The result is part of the caller's
/// autograd graph. It supports `backward()`, `autograd::grad`, several inputs
/// and outputs, inputs that require no gradient, nesting and second
/// derivatives. Gradients equal those of a plain call; on the CPU they are
/// bit-identical.
///
/// `function` is called once now and one or more times during backward,
/// possibly on one of autograd's threads. What it captures must stay valid
/// until the autograd graph is destroyed. It must not modify its inputs in
/// place (c10::Error). If grad mode is off, this is a plain call.
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

/// Overload of checkpoint_list() for modules and for callables on single
/// tensors:
///
///     auto y = checkpoint(block, x);      // a module
///     auto z = checkpoint(attend, a, b);  // attend(a, b), any callable
///
/// Returns what the function returns: a tensor, a tuple or a list of tensors.
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

/// While it exists, tensors that autograd saves on this thread and that share the memory of
/// `value` are not kept: the backward computes `again(inputs)`, which must have the same values,
/// and uses them instead. For values that are cheap to compute from others that are saved
/// anyway, such as the output of a norm. Unlike checkpoint(), the forward may compute `value`
/// together with its inputs:
///
///     const auto [sum, normalized] = ops::add_norm(x, branch, norm);
///     const RecomputeSaved scope(normalized, {sum}, [norm](const Tensors& in) {
///       return ops::add_norm(in[0], {}, norm).normalized;
///     });
///     return ops::linear(normalized, weight);
///
/// `again` runs without gradients and with the autocast mode of now; it must not use random
/// numbers. `value` must be contiguous. Other tensors, views of a part and tensors of another
/// type are saved as usual.
class RecomputeSaved {
 public:
  using Function = std::function<torch::Tensor(const Tensors&)>;

  RecomputeSaved(const torch::Tensor& value, const Tensors& inputs,
                 Function again);
  ~RecomputeSaved();
  RecomputeSaved(const RecomputeSaved&) = delete;
  RecomputeSaved& operator=(const RecomputeSaved&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// checkpoint_with() with default options.
template <class F, detail::IsTensor... T>
auto checkpoint(F function, const T&... inputs) {
  return checkpoint_with(CheckpointOptions{}, std::move(function), inputs...);
}

}  // namespace reprise
