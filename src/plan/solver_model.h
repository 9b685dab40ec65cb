#pragma once

#include <reprise/recompute/simulate.h>

#include <algorithm>
#include <cstdint>
#include <vector>

/// The chain as the solver sees it. The solver reverses *intervals*: stages
/// s … t-1, run forward from boundary s and then backward. The interval owns
/// boundary s. What others hold at the same time costs the same whatever the
/// interval does, so that its own memory is enough to choose by.
namespace reprise::detail {

/// A run of stage s that keeps its graph, in one context.
struct Keep {
  int variant = 0;
  int64_t forward_bytes = 0;   ///< live in the run, gradients aside
  int64_t held_bytes = 0;      ///< by its graph, until its backward
  int64_t backward_bytes = 0;  ///< live in its backward, gradients included
  int next = 0;                ///< the context of stage s + 1 after it
  float ms = 0;                ///< forward and backward
};

/// What is held by others of the boundary that an interval starts from: by
/// graphs that saved it, or by an earlier boundary that has it too.
struct Context {
  uint64_t pinned = 0;    ///< buffers of the boundary, as bits
  int64_t own_bytes = 0;  ///< the other buffers of the boundary
  std::vector<Keep> keeps;

  /// Of the runs that keep the graph, backward included.
  float fastest_ms() const {
    float ms = keeps.front().ms;
    for (const Keep& keep : keeps) ms = std::min(ms, keep.ms);
    return ms;
  }
};

/// Runs from boundary s to boundary t that drop their graphs.
struct Drop {
  int64_t bytes = 0;  ///< most live in them besides boundary s
  int context = 0;    ///< of boundary t, while boundary s is held
};

struct ChainModel {
  int stages = 0;
  std::vector<std::vector<Context>> contexts;  ///< by the stage to start at
  std::vector<std::vector<int>> ends;    ///< by s: where intervals may end
  std::vector<std::vector<Drop>> drops;  ///< by s, for each of its ends
  std::vector<double> forward_ms;        ///< of all stages before s
  /// The gradient that is live while an interval with this end runs forward.
  std::vector<int64_t> gradient_bytes;
  /// The chain's output, which the caller has once the last stage has run.
  int64_t output_bytes = 0;

  const Context& context(int s, int c) const {
    return contexts[static_cast<size_t>(s)][static_cast<size_t>(c)];
  }
  const std::vector<int>& ends_of(int s) const {
    return ends[static_cast<size_t>(s)];
  }
  /// Where t stands among the ends of s.
  size_t end_index(int s, int t) const {
    if (t - s <= near || is_far(s)) return static_cast<size_t>(t - s - 1);
    return static_cast<size_t>(near + far_before[static_cast<size_t>(t)] -
                               far_before[static_cast<size_t>(s + near + 1)]);
  }
  bool is_end(int s, int t) const {
    return t - s <= near || is_far(t) || is_far(s);
  }
  const Drop& drop(int s, int t) const {
    return drops[static_cast<size_t>(s)][end_index(s, t)];
  }
  int64_t gradient(int t) const {
    return gradient_bytes[static_cast<size_t>(t)];
  }
  /// What a run of s … t-1 takes.
  float forward(int s, int t) const {
    return static_cast<float>(forward_ms[static_cast<size_t>(t)] -
                              forward_ms[static_cast<size_t>(s)]);
  }
  /// What is live in the backward of stage s, in an interval that ends at t.
  int64_t backward_bytes(int s, const Keep& keep, int t) const {
    const bool output = t == stages && s + 1 < stages;
    return keep.backward_bytes + (output ? output_bytes : 0);
  }
  /// A place for every interval in every context, in an array.
  size_t position(int s, int c, int t) const {
    return first_position[static_cast<size_t>(s)] +
           static_cast<size_t>(c) * ends_of(s).size() + end_index(s, t);
  }
  size_t positions() const { return first_position.back(); }

  // Intervals end at any of the next `near` boundaries, and start or end at a far
  // one if they are longer.
  int near = 32;
  std::vector<int> far_before;  ///< by boundary: far ones before it
  bool is_far(int t) const {
    const auto i = static_cast<size_t>(t);
    return far_before[i + 1] > far_before[i];
  }
  std::vector<size_t> first_position;  ///< by s
};

/// A short chain has all intervals. In a long one an interval spans at most
/// `near` stages, or one of its ends is a *far* boundary: the chain's own ends and
/// of each of `far` groups of boundaries the smallest. From a far boundary, and to
/// one, all intervals are there: with little memory a chain is run again and again
/// from the same boundary, to one place after another.
struct ModelLimits {
  int all = 0;  ///< stages that still count as short
  int near = 0;
  int far = 0;
};
ChainModel make_chain_model(const ChainCosts& figures,
                            const ModelLimits& limits);

}  // namespace reprise::detail
