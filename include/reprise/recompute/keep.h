#pragma once

#include <reprise/recompute/checkpoint.h>

#include <functional>
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

/// Overload of keep_list() for modules and for callables on single tensors.
/// Returns what the function returns: a tensor, a tuple or a list of tensors.
template <class F, detail::IsTensor... T>
auto keep(const std::string& name, F function, const T&... inputs) {
  if constexpr (detail::ModuleHolder<F> || detail::ModulePointer<F>) {
    return keep(name, detail::CallForward<F>{std::move(function)}, inputs...);
  } else {
    constexpr auto kIndices = std::make_index_sequence<sizeof...(T)>{};
    using Result = std::decay_t<decltype(detail::call_with(
        function, std::declval<const Tensors&>(), kIndices))>;
    Tensors outputs = keep_list(
        name,
        [&function](const Tensors& list) {
          return detail::to_tensors(
              detail::call_with(function, list, decltype(kIndices){}));
        },
        Tensors{torch::Tensor(inputs)...});
    return detail::from_tensors<Result>(std::move(outputs));
  }
}

/// Names of the variants that with_named_saves() adds.
inline constexpr const char* kRecomputed = "recomputed";
inline constexpr const char* kRecomputedButNamed =
    "recomputed except for named values";

/// Returns a copy of `stage`, whose function calls keep(), with two additional
/// variants for the planner: the function inside of checkpoint(), without any
/// value of keep(), and with all of them.
Stage with_named_saves(const Stage& stage);

}  // namespace reprise
