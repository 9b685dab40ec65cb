#pragma once

#include <reprise/recompute/checkpoint.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace reprise {

/// Runs `function(inputs)` and keeps its results in spite of the checkpoint()
/// that runs it, so that the recomputation does not run it again. For the few
/// expensive operators of a checkpointed function:
///
///     checkpoint([&](const Tensor& x) {
///       auto qkv = keep("qkv", qkv_linear, norm(x));
///       return x + project(attend(qkv));
///     }, x);
///
/// What is kept are the outputs, and the tensors that autograd saves inside
/// `function` unless they are its inputs or views of them: for a linear layer
/// its output. Inputs are recomputed. A KeptMeter counts what is kept. If
/// checkpoints are nested, the innermost one keeps, and an outer one drops what
/// the inner one would keep. The result is part of the caller's autograd graph,
/// and gradients equal those of a plain call; on the CPU they are
/// bit-identical. Second derivatives are supported.
///
/// `name` is used by CheckpointOptions::keep_names and in errors; several calls
/// may have the same. Outside of a checkpointed function, inside of another
/// keep(), and if keep_names does not list the name, this is a plain call.
///
/// `function` may use random numbers. It must not modify its inputs in place,
/// and its outputs must not be modified in place afterwards (c10::Error). It
/// must not change buffers or other state that the rest of the checkpointed
/// function reads.
Tensors keep_list(const std::string& name,
                  const std::function<Tensors(const Tensors&)>& function,
                  const Tensors& inputs);

/// As keep_list(), but the values go to host memory, and are copied back for the
/// backward: to CheckpointOptions::offload_store of the checkpoint() that runs
/// the function. Tensors of less than HostOptions::min_bytes, and those for which
/// the store has no room, stay on the device. Without a store, as on the CPU, and
/// if an outer checkpoint would drop the values, this is keep_list().
Tensors offload_list(const std::string& name,
                     const std::function<Tensors(const Tensors&)>& function,
                     const Tensors& inputs);

namespace detail {

template <auto kList, class F, IsTensor... T>
auto call_named(const std::string& name, F function, const T&... inputs) {
  if constexpr (ModuleHolder<F> || ModulePointer<F>) {
    return call_named<kList>(name, CallForward<F>{std::move(function)},
                             inputs...);
  } else {
    constexpr auto kIndices = std::make_index_sequence<sizeof...(T)>{};
    using Result = std::decay_t<decltype(call_with(
        function, std::declval<const Tensors&>(), kIndices))>;
    Tensors outputs = kList(
        name,
        [&function](const Tensors& list) {
          return to_tensors(call_with(function, list, decltype(kIndices){}));
        },
        Tensors{torch::Tensor(inputs)...});
    return from_tensors<Result>(std::move(outputs));
  }
}

}  // namespace detail

/// Overloads of keep_list() and offload_list() for modules and for callables on
/// single tensors. They return what the function returns: a tensor, a tuple or a
/// list of tensors.
template <class F, detail::IsTensor... T>
auto keep(const std::string& name, F function, const T&... inputs) {
  return detail::call_named<keep_list>(name, std::move(function), inputs...);
}
template <class F, detail::IsTensor... T>
auto offload(const std::string& name, F function, const T&... inputs) {
  return detail::call_named<offload_list>(name, std::move(function), inputs...);
}

/// Names of the variants that with_named_saves() adds.
inline constexpr const char* kRecomputed = "recomputed";
inline constexpr const char* kRecomputedButNamed =
    "recomputed except for named values";

inline constexpr const char* kNamedOnHost =
    "recomputed, offloaded values on the host";

/// Returns a copy of `stage`, whose function calls keep() or offload(), with two
/// additional variants for the planner: the function inside of checkpoint(),
/// without any named value, and with all of them on the device. With a store, a
/// third one has the values of offload() in it. The store needs room for those of
/// all stages of a chain; a plan does not know if some stay on the device.
Stage with_named_saves(const Stage& stage,
                       std::shared_ptr<HostStore> store = nullptr,
                       const HostOptions& options = {});

}  // namespace reprise
