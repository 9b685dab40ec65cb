#pragma once

#include <reprise/recompute/simulate.h>

#include <algorithm>
#include <cstdint>
#include <vector>

/// The solver's model of a chain. The solver reverses *intervals*: stages s …
/// t-1, run forward from boundary s and then backward. The interval owns
/// boundary s. Memory held outside of the interval does not depend on how it is
/// reversed, so that only its own memory has to be compared. Tested by
/// tests/plan/solver_test.cpp.
namespace reprise::detail {

/// A run of stage s that keeps its autograd graph, in one context.
struct KeptRun {
  int variant = 0;
  int64_t forward_bytes = 0;   ///< peak of the run, without gradients
  int64_t held_bytes = 0;      ///< held until its backward
  int64_t backward_bytes = 0;  ///< peak of its backward, with gradients
  int next = 0;                ///< context of stage s + 1 after it
  float ms = 0;                ///< forward and backward
  float unused_ms = 0;         ///< less if the backward follows the forward
};

/// Which buffers of the boundary at the start of an interval are held outside
/// of it: by autograd graphs that saved them, or by an earlier boundary that
/// shares them.
struct Context {
  uint64_t pinned = 0;    ///< bit mask of buffers held outside
  int64_t own_bytes = 0;  ///< bytes of the other buffers
  std::vector<KeptRun> kept_runs;
};

/// The runs from boundary s to boundary t that drop their autograd graphs.
struct DroppedRun {
  int64_t bytes = 0;  ///< peak of the runs, without boundary s
  int context = 0;    ///< context of boundary t while boundary s is held
};

struct ChainModel {
  int stages = 0;
  std::vector<std::vector<Context>> contexts;  ///< by first stage
  std::vector<std::vector<int>> ends;          ///< ends of intervals, by s
  std::vector<std::vector<DroppedRun>> drops;  ///< by s and index of the end
  std::vector<double> forward_ms;              ///< sum over all stages before s
  /// Gradients that are live while an interval with this end runs forward.
  std::vector<int64_t> gradient_bytes;
  /// Bytes of the chain's output, which the caller holds after the last stage
  /// has run.
  int64_t output_bytes = 0;

  const Context& context(int s, int c) const {
    return contexts[static_cast<size_t>(s)][static_cast<size_t>(c)];
  }
  const std::vector<int>& ends_of(int s) const {
    return ends[static_cast<size_t>(s)];
  }
  /// Index of t among the ends of s.
  size_t end_index(int s, int t) const {
    if (t - s <= near || is_far(s)) return static_cast<size_t>(t - s - 1);
    return static_cast<size_t>(near + far_before[static_cast<size_t>(t)] -
                               far_before[static_cast<size_t>(s + near + 1)]);
  }
  bool is_end(int s, int t) const {
    return t - s <= near || is_far(t) || is_far(s);
  }
  const DroppedRun& drop(int s, int t) const {
    return drops[static_cast<size_t>(s)][end_index(s, t)];
  }
  int64_t gradient(int t) const {
    return gradient_bytes[static_cast<size_t>(t)];
  }
  /// Time of a forward run of stages s … t-1.
  float forward(int s, int t) const {
    return static_cast<float>(forward_ms[static_cast<size_t>(t)] -
                              forward_ms[static_cast<size_t>(s)]);
  }
  /// Time of a kept run of stage s in an interval that ends at t. The backward of the interval's
  /// last stage follows its forward, and except at the end of the chain nothing reads its output.
  float kept_ms(int s, const KeptRun& run, int t) const {
    return run.ms - (s + 1 == t && t < stages ? run.unused_ms : 0);
  }
  /// Time of the fastest kept run.
  float fastest_ms(int s, int c, int t) const {
    const auto& runs = context(s, c).kept_runs;
    float ms = kept_ms(s, runs.front(), t);
    for (const KeptRun& run : runs) ms = std::min(ms, kept_ms(s, run, t));
    return ms;
  }
  /// Peak of the backward of stage s in an interval that ends at t.
  int64_t backward_bytes(int s, const KeptRun& run, int t) const {
    const bool output = t == stages && s + 1 < stages;
    return run.backward_bytes + (output ? output_bytes : 0);
  }
  /// Index of an interval and context in arrays of length positions().
  size_t position(int s, int c, int t) const {
    return first_position[static_cast<size_t>(s)] +
           static_cast<size_t>(c) * ends_of(s).size() + end_index(s, t);
  }
  size_t positions() const { return first_position.back(); }

  // Intervals end at one of the next `near` boundaries. Longer ones start or
  // end at a far boundary.
  int near = 32;
  std::vector<int> far_before;  ///< number of far boundaries before each one
  bool is_far(int t) const {
    const auto i = static_cast<size_t>(t);
    return far_before[i + 1] > far_before[i];
  }
  std::vector<size_t> first_position;  ///< by s
};

/// Limits the number of intervals in long chains. A chain of at most `all`
/// stages has all intervals. In a longer one, an interval spans at most `near`
/// stages, or one of its ends is a *far* boundary: an end of the chain, or the
/// smallest boundary of one of `far` groups. All intervals that start or end at
/// a far boundary exist, because with little memory a chain is recomputed
/// repeatedly from the same boundary.
struct ModelLimits {
  int all = 0;  ///< maximum number of stages of a short chain
  int near = 0;
  int far = 0;
};

/// Builds the model of a chain.
ChainModel make_chain_model(const ChainCosts& chain_costs,
                            const ModelLimits& limits);

}  // namespace reprise::detail
