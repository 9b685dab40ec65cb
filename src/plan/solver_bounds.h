#pragma once

#include "plan/solver_model.h"

#include <reprise/recompute/schedule.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace reprise::detail {

/// One way to reverse the interval from s to t. Either stage s is kept, or the
/// stages up to a kept boundary, the split, run without autograd graphs, and
/// the interval from s to the split is reversed later. This leaves one or two
/// smaller intervals to reverse. Each of them has the memory of the whole
/// interval minus what is held meanwhile.
struct Reversal {
  int kept_run = -1;       ///< index into Context::kept_runs, or -1
  int split = -1;          ///< boundary, or -1
  float ms = 0;            ///< time without the smaller intervals
  int64_t own_bytes = 0;   ///< peak outside of the smaller intervals
  int rest = -1;           ///< position of the interval after s or the split
  int64_t rest_held = 0;   ///< bytes held while `rest` is reversed
  int front = -1;          ///< position of the interval from s to the split
  int64_t front_held = 0;  ///< bytes held while `front` is reversed
};

/// Calls `visit(s, c, t)` for every interval [s, t) in every context c. Smaller
/// intervals come before those that contain them.
template <class F>
void for_each_interval(const ChainModel& model, F&& visit) {
  for (int t = 1; t <= model.stages; ++t) {
    for (int s = t - 1; s >= 0; --s) {
      if (!model.is_end(s, t)) continue;
      const auto contexts = model.contexts[static_cast<size_t>(s)].size();
      for (int c = 0; c < static_cast<int>(contexts); ++c) visit(s, c, t);
    }
  }
}

/// Calls `visit(reversal)` for every way to reverse [s, t) in context c: first
/// those that keep stage s, then the splits in ascending order.
template <class F>
void for_each_reversal(const ChainModel& model, int s, int c, int t,
                       F&& visit) {
  const Context& context = model.context(s, c);
  const bool can_keep = s + 1 == t || model.is_end(s + 1, t);
  for (size_t k = 0; can_keep && k < context.kept_runs.size(); ++k) {
    const KeptRun& run = context.kept_runs[k];
    Reversal reversal;
    reversal.kept_run = static_cast<int>(k);
    reversal.ms = model.kept_ms(s, run, t);
    reversal.own_bytes = std::max(run.forward_bytes + model.gradient(t),
                                  model.backward_bytes(s, run, t));
    if (s + 1 < t) {
      reversal.rest = static_cast<int>(model.position(s + 1, run.next, t));
      reversal.rest_held = run.held_bytes;
    }
    visit(reversal);
  }
  const int64_t output = t == model.stages ? model.output_bytes : 0;
  const auto& ends = model.ends_of(s);
  const auto& drops = model.drops[static_cast<size_t>(s)];
  const auto first = static_cast<int>(model.position(s, c, s + 1));
  for (size_t i = 0; i < ends.size() && ends[i] < t; ++i) {
    if (!model.is_end(ends[i], t)) continue;
    Reversal reversal;
    reversal.split = ends[i];
    reversal.ms = model.forward(s, ends[i]);
    reversal.own_bytes = context.own_bytes + drops[i].bytes + model.gradient(t);
    reversal.rest =
        static_cast<int>(model.position(ends[i], drops[i].context, t));
    reversal.rest_held = context.own_bytes;
    reversal.front = first + static_cast<int>(i);
    reversal.front_held = output;
    visit(reversal);
  }
}

/// Exact bounds on the memory of every interval, indexed by its position in the
/// model. They alone determine whether a schedule fits. Tested by
/// tests/plan/solver_test.cpp.
class MemoryBounds {
 public:
  explicit MemoryBounds(const ChainModel& model);

  /// Returns the minimum memory in which the interval can be reversed.
  int64_t min_bytes(int position) const { return min_bytes_[at(position)]; }
  /// Returns the minimum memory for one way to reverse an interval.
  int64_t min_bytes(const Reversal& reversal) const {
    int64_t bytes = reversal.own_bytes;
    if (reversal.rest >= 0)
      bytes = std::max(bytes, min_bytes(reversal.rest) + reversal.rest_held);
    if (reversal.front >= 0) {
      bytes = std::max(bytes, min_bytes(reversal.front) + reversal.front_held);
    }
    return bytes;
  }
  /// Returns the minimum memory to keep every stage of the interval as one of
  /// its fastest variants, or a practically infinite number if the model does
  /// not allow that.
  int64_t keep_all_bytes(int position) const {
    return keep_all_bytes_[at(position)];
  }
  /// Returns the minimum memory held outside of the interval while it is
  /// reversed.
  int64_t held_bytes(int position) const { return held_bytes_[at(position)]; }

  /// Position of the whole chain.
  int whole() const { return whole_; }
  /// Returns the schedule of the chain with the minimum memory, whatever its
  /// time.
  std::vector<Op> smallest_ops() const;
  /// Returns the fastest schedule of the chain, which keeps every stage.
  std::vector<Op> fastest_ops() const;

 private:
  static size_t at(int position) { return static_cast<size_t>(position); }
  int64_t keep_all_bytes(const Reversal& reversal) const;
  void compute_held_bytes();

  const ChainModel* model_;
  int whole_;
  std::vector<int64_t> min_bytes_, keep_all_bytes_, held_bytes_;
};

/// Generates the schedule of the chain. `choose(s, c, t, bytes)` returns how to
/// reverse [s, t) in context c within `bytes`.
template <class Choose>
class ScheduleBuilder {
 public:
  ScheduleBuilder(const ChainModel& model, Choose choose)
      : model_(model), choose_(std::move(choose)) {}

  std::vector<Op> build(int64_t bytes) {
    reverse(0, 0, model_.stages, bytes);
    return std::move(ops_);
  }

 private:
  void reverse(int s, int c, int t, int64_t bytes) {
    const Reversal reversal = choose_(s, c, t, bytes);
    if (reversal.kept_run >= 0) {
      const KeptRun& run =
          model_.context(s, c)
              .kept_runs[static_cast<size_t>(reversal.kept_run)];
      ops_.push_back({OpKind::kForwardKeep, s, run.variant});
      if (s + 1 < t) {
        reverse(s + 1, run.next, t, bytes - reversal.rest_held);
      } else if (t != model_.stages) {
        ops_.push_back({OpKind::kDiscard, t});
      }
      ops_.push_back({OpKind::kBackward, s});
      return;
    }
    for (int i = s; i < reversal.split; ++i) {
      ops_.push_back(
          {i == s ? OpKind::kForwardKeepInput : OpKind::kForwardDrop, i});
    }
    reverse(reversal.split, model_.drop(s, reversal.split).context, t,
            bytes - reversal.rest_held);
    reverse(s, c, reversal.split, bytes - reversal.front_held);
  }

  const ChainModel& model_;
  Choose choose_;
  std::vector<Op> ops_;
};

}  // namespace reprise::detail
