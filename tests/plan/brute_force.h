#pragma once

#include <reprise/recompute/simulate.h>

#include <algorithm>
#include <cstdint>
#include <queue>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace reprise::testing {

/// Searches all schedules of a short chain, operation by operation, for those
/// that are Pareto-optimal in time and memory. It implements the rules of
/// Schedule and simulate() and does not use intervals. For chains of up to six
/// stages with one new tensor between stages and up to two variants per stage.
class BruteForce {
 public:
  enum Rules {
    kAny,
    /// A boundary is released only by the run that keeps its stage, unless the
    /// next operation uses it.
    kPersistent,
    /// In addition, a stage is recomputed only for the next backward, from the
    /// nearest held boundary, and not while it is kept. This is what the solver
    /// guarantees.
    kInOrder,
  };
  struct Point {
    int64_t peak_bytes;
    double time_ms;
    std::vector<Op> ops;
  };

  BruteForce(const ChainCosts& chain_costs, Rules rules)
      : chain_costs_(chain_costs),
        n_(static_cast<int>(chain_costs.stages.size())),
        rules_(rules) {
    search();
  }

  /// Returns the optimal points by descending memory and ascending time.
  const std::vector<Point>& points() const { return points_; }

  /// Returns the minimum time within `bytes`, or a negative number if nothing
  /// fits.
  double time_ms(int64_t bytes) const {
    for (const Point& point : points_) {
      if (point.peak_bytes <= bytes) return point.time_ms;
    }
    return -1;
  }

 private:
  static constexpr int kMost = 7;  // boundaries

  /// Copies of each boundary, numbered from 1, by holder; 0 if there is none.
  struct State {
    int8_t held[kMost] = {};
    int8_t as_output[kMost] = {};  // saved by the stage before
    int8_t as_input[kMost] = {};   // saved by the stage after;
                                   // for the last boundary: held by the caller
    int8_t graph[kMost] = {};      // variant + 1
    int8_t reached = 0;            // stages run by the forward pass
    int8_t due = 0;                // backwards not run yet
    int8_t fresh = 7;              // created by the last operation; 7 if none

    /// Numbers the copies in order, so that equal states have equal
    /// representations.
    uint64_t key() {
      uint64_t bits = 0;
      for (int b = 0; b < kMost; ++b) {
        int8_t names[8] = {};
        int8_t next = 1;
        for (int8_t* copy : {&held[b], &as_output[b], &as_input[b]}) {
          if (*copy == 0) continue;
          if (names[*copy] == 0) names[*copy] = next++;
          *copy = names[*copy];
        }
        bits = bits << 6 |
               uint64_t(held[b] << 4 | as_output[b] << 2 | as_input[b]);
      }
      for (int i = 0; i < kMost - 1; ++i) bits = bits << 2 | uint64_t(graph[i]);
      return bits << 9 | uint64_t(reached << 6 | due << 3 | fresh);
    }
  };
  struct Label {
    double time_ms;
    int64_t peak_bytes;
    State state;
    Op op;
    int parent;
  };

  int64_t live(const State& state) const {
    int64_t bytes = 0;
    for (int b = 1; b <= n_; ++b) {  // the caller holds boundary 0
      bool seen[8] = {true};
      for (const int copy :
           {state.held[b], state.as_output[b], state.as_input[b]}) {
        if (!seen[copy]) bytes += stage(b - 1).outputs[0].bytes;
        seen[copy] = true;
      }
    }
    for (int i = 0; i < n_; ++i) {
      if (state.graph[i] > 0) {
        bytes += stage(i).kept_run(state.graph[i] - 1).saved_bytes;
      }
    }
    return bytes + gradient(state);
  }

  int64_t gradient(const State& state) const {
    if (state.reached < n_) return 0;
    if (state.due == n_) return chain_costs_.output_gradient_bytes;
    return stage(state.due).input_gradient_bytes;
  }

  const StageCosts& stage(int i) const {
    return chain_costs_.stages[static_cast<size_t>(i)];
  }

  void search() {
    State start;
    start.held[0] = 1;
    start.due = static_cast<int8_t>(n_);
    push(start, 0, 0, Op{OpKind::kDiscard, 0}, -1);
    std::unordered_map<uint64_t, int64_t> least;  // peak, by state
    while (!queue_.empty()) {
      const int at = std::get<2>(queue_.top());
      queue_.pop();
      Label label = labels_[static_cast<size_t>(at)];
      if (!points_.empty() && label.peak_bytes >= points_.back().peak_bytes) {
        continue;
      }
      const auto [found, added] =
          least.try_emplace(label.state.key(), label.peak_bytes);
      if (!added) {
        if (found->second <= label.peak_bytes) continue;
        found->second = label.peak_bytes;
      }
      if (is_end(label.state)) {
        points_.push_back({label.peak_bytes, label.time_ms, path(at)});
        continue;
      }
      for (int i = 0; i <= n_; ++i) expand(label, at, i);
    }
  }

  bool is_end(const State& state) const {
    return state.due == 0 && std::all_of(state.held, state.held + kMost,
                                         [](int8_t copy) { return copy == 0; });
  }

  std::vector<Op> path(int at) const {
    std::vector<Op> ops;
    for (; labels_[static_cast<size_t>(at)].parent >= 0;
         at = labels_[static_cast<size_t>(at)].parent) {
      ops.push_back(labels_[static_cast<size_t>(at)].op);
    }
    std::reverse(ops.begin(), ops.end());
    return ops;
  }

  void push(const State& state, double time_ms, int64_t peak_bytes, Op op,
            int parent) {
    labels_.push_back({time_ms, peak_bytes, state, op, parent});
    queue_.push({-time_ms, -peak_bytes, static_cast<int>(labels_.size()) - 1});
  }

  void expand(const Label& from, int at, int i) {
    const State& state = from.state;
    if (state.held[i] > 0) {
      const bool may_go =
          rules_ == kAny || state.fresh == i || i >= state.due || i == n_;
      if (may_go) discard(from, at, i);
      const bool may_run =
          i < state.due && state.held[i + 1] == 0 &&
          (state.reached == n_ ? is_in_turn(state, i) : state.reached == i);
      if (may_run) {
        forward(from, at, {OpKind::kForwardKeepInput, i});
        if (rules_ == kAny || state.fresh == i) {
          forward(from, at, {OpKind::kForwardDrop, i});
        }
        const auto variants = static_cast<int>(stage(i).variants.size());
        for (int v = 0; state.graph[i] == 0 && v <= variants; ++v) {
          forward(from, at, {OpKind::kForwardKeep, i, v});
        }
      }
    }
    if (i < n_ && state.reached == n_ && state.due == i + 1 &&
        state.graph[i] > 0) {
      backward(from, at, i);
    }
  }

  bool is_in_turn(const State& state, int i) const {
    if (rules_ != kInOrder) return true;
    const bool nearest = std::all_of(state.held + i + 1, state.held + state.due,
                                     [](int8_t copy) { return copy == 0; });
    return nearest && state.graph[i] == 0 && state.graph[state.due - 1] == 0;
  }

  void discard(const Label& from, int at, int i) {
    State state = from.state;
    state.held[i] = 0;
    state.fresh = 7;
    push(state, from.time_ms, from.peak_bytes, {OpKind::kDiscard, i}, at);
  }

  void forward(const Label& from, int at, Op op) {
    const int i = op.stage;
    State state = from.state;
    const KeptRunCosts& run = stage(i).kept_run(op.variant);
    state.held[i + 1] = 7;  // a new copy
    int64_t extra = stage(i).drop_extra_bytes;
    if (op.kind == OpKind::kForwardKeep) {
      state.graph[i] = static_cast<int8_t>(op.variant + 1);
      if (!run.saved_inputs.empty()) state.as_input[i] = state.held[i];
      if (!run.saved_outputs.empty()) state.as_output[i + 1] = 7;
      extra = run.keep_extra_bytes;
    }
    const int64_t peak = std::max(from.peak_bytes, live(state) + extra);
    if (op.kind != OpKind::kForwardKeepInput) state.held[i] = 0;
    state.fresh = static_cast<int8_t>(i + 1);
    if (state.reached < n_) {
      ++state.reached;
      if (state.reached == n_) {
        state.as_input[n_] = state.held[n_];
        state.held[n_] = 0;
      }
    }
    state.key();
    // Nothing reads the output: the backward of this stage is the next one.
    const bool unused = from.state.reached == n_ && i + 1 < n_ &&
                        i + 1 == from.state.due &&
                        op.kind == OpKind::kForwardKeep;
    push(state,
         from.time_ms + run.forward_ms - (unused ? run.unused_output_ms : 0),
         peak, op, at);
  }

  void backward(const Label& from, int at, int i) {
    State state = from.state;
    const KeptRunCosts& run = stage(i).kept_run(state.graph[i] - 1);
    const int64_t peak =
        std::max(from.peak_bytes, live(state) + run.backward_extra_bytes);
    state.graph[i] = 0;
    state.as_input[i] = 0;
    state.as_output[i + 1] = 0;
    state.due = static_cast<int8_t>(i);
    state.fresh = 7;
    state.key();
    push(state, from.time_ms + run.backward_ms, peak, {OpKind::kBackward, i},
         at);
  }

  const ChainCosts& chain_costs_;
  const int n_;
  const Rules rules_;
  std::vector<Label> labels_;
  std::priority_queue<std::tuple<double, int64_t, int>> queue_;
  std::vector<Point> points_;
};

}  // namespace reprise::testing
