#pragma once

#include <reprise/recompute/chain.h>
#include <reprise/recompute/checkpoint.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

/// Recomputation inside of an arbitrary forward function, decided by a plan.
///
/// A chain can recompute a model that is a sequence of stages. For any other
/// forward, with skip connections, branches and loops, mark parts of it as
/// regions and leave the function as it is:
///
///     auto forward = [=](const Tensors& in) mutable -> Tensors {
///       auto a = region("down", down, in[0]);
///       auto b = region("middle", middle, pool(a));
///       auto c = region("up", [up = up](Tensor b, Tensor a) mutable {
///         return up(torch::cat({upsample(b), a}, 1));
///       }, b, a);
///       return {loss(c, in[1])};
///     };
///
///     Chain chain({Stage("net", forward, {net})});
///     chain = with_region_variants(chain, batch);
///
/// The whole forward is then one stage with a few variants, each of which
/// recomputes more regions than the one before, beginning with those that free
/// the most memory per time. The planner measures and chooses them like any
/// other variant. A chain may have several such stages.
namespace reprise {

/// Runs `function(inputs)`. In a variant that recomputes the region `name`, the
/// call is checkpoint_list(); otherwise, and outside of a stage, a plain call.
/// Gradients equal those of a plain call; on the CPU they are bit-identical.
///
/// As for checkpoint(), `function` must not modify its inputs in place, and
/// what it captures must stay valid until the autograd graph is destroyed: pass
/// tensors as inputs, and capture modules by their holders, not local variables
/// by reference. `modules` are the modules whose buffers it updates; empty:
/// those of the stage, of whose buffers each recomputed region then holds a copy. Calls with the same name are recomputed together. A
/// region inside of a recomputed one is a part of it. Code between regions is
/// never recomputed by them.
Tensors region_list(const std::string& name,
                    std::function<Tensors(const Tensors&)> function,
                    const Tensors& inputs, const Modules& modules = {});

/// Overload of region_list() for modules and for callables on single tensors.
/// Returns what the function returns: a tensor, a tuple or a list of tensors.
template <class F, detail::IsTensor... T>
auto region(const std::string& name, F function, const T&... inputs) {
  constexpr auto kIndices = std::make_index_sequence<sizeof...(T)>{};
  Modules modules;
  if constexpr (detail::ModuleHolder<F>) {
    modules.push_back(function.ptr());
  } else if constexpr (detail::ModulePointer<F>) {
    modules.push_back(function);
  }
  const auto run = [&modules, &name, &inputs...](auto callable) {
    using Result = std::decay_t<decltype(detail::call_with(
        callable, std::declval<const Tensors&>(), kIndices))>;
    Tensors outputs = region_list(
        name,
        [callable](const Tensors& list) mutable {
          return detail::to_tensors(
              detail::call_with(callable, list, decltype(kIndices){}));
        },
        Tensors{torch::Tensor(inputs)...}, modules);
    return detail::from_tensors<Result>(std::move(outputs));
  };
  if constexpr (detail::ModuleHolder<F> || detail::ModulePointer<F>) {
    return run(detail::CallForward<F>{std::move(function)});
  } else {
    return run(std::move(function));
  }
}

/// Costs of the calls of one region in a run of its stage.
struct RegionCosts {
  std::string name;
  /// Memory that its autograd graph saves, without its inputs and outputs.
  int64_t saved_bytes = 0;
  double forward_ms = 0;  ///< time of a recomputation
};

/// Runs `stage` twice on `inputs` and returns the regions that it calls, by
/// descending saved bytes per millisecond. Needs the memory of an evaluation.
/// Buffers and random generators are restored. Expects grad mode to be on
/// (c10::Error).
std::vector<RegionCosts> measure_regions(const Stage& stage,
                                         const Tensors& inputs);

/// Returns a copy of `stage` with additional variants: the first recomputes the
/// first regions of `order`, the last recomputes all of them. There are at most
/// `max_variants`, one per region if there are fewer regions. Throws c10::Error
/// if `max_variants` is not positive.
Stage with_region_variants(const Stage& stage,
                           const std::vector<std::string>& order,
                           int max_variants = 8);

/// Applies measure_regions() and with_region_variants() to all stages of
/// `chain`; those without regions that save memory stay as they are. Stages of
/// one kind have the order of the first one. `inputs` are those of a training
/// step, on the device that trains. The order depends on measured times: keep
/// the result for the whole training, and if several ranks train, give them one
/// order.
Chain with_region_variants(const Chain& chain, const Tensors& inputs,
                           int max_variants = 8);

}  // namespace reprise
