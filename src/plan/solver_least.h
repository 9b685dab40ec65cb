#pragma once

#include "plan/solver_model.h"

#include <reprise/recompute/schedule.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace reprise::detail {

/// One way to reverse the interval from s to t: keep the graph of stage s, or
/// run without graphs up to a boundary that is kept, and return to s later. What
/// is left to reverse are one or two smaller intervals. Each of them has the
/// memory of the whole less what is held for the other meanwhile.
struct Way {
  int keep = -1;           ///< position in Context::keeps, or
  int split = -1;          ///< the boundary
  float ms = 0;            ///< besides the parts
  int64_t own_bytes = 0;   ///< most that is live besides the parts
  int rest = -1;           ///< position of the interval behind s or the split
  int64_t rest_held = 0;   ///< held meanwhile
  int front = -1;          ///< position of the interval from s to the split
  int64_t front_held = 0;  ///< held meanwhile
};

/// Calls `visit(s, c, t)` for every interval, after the intervals that it is
/// made of.
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

/// Calls `visit(way)` for every way to reverse [s, t) in context c: first those
/// that keep stage s, then the splits from near to far.
template <class F>
void for_each_way(const ChainModel& model, int s, int c, int t, F&& visit) {
  const Context& context = model.context(s, c);
  const bool keeps = s + 1 == t || model.is_end(s + 1, t);
  for (size_t k = 0; keeps && k < context.keeps.size(); ++k) {
    const Keep& keep = context.keeps[k];
    Way way;
    way.keep = static_cast<int>(k);
    way.ms = keep.ms;
    way.own_bytes = std::max(keep.forward_bytes + model.gradient(t),
                             model.backward_bytes(s, keep, t));
    if (s + 1 < t) {
      way.rest = static_cast<int>(model.position(s + 1, keep.next, t));
      way.rest_held = keep.held_bytes;
    }
    visit(way);
  }
  const int64_t output = t == model.stages ? model.output_bytes : 0;
  const auto& ends = model.ends_of(s);
  const auto& drops = model.drops[static_cast<size_t>(s)];
  const auto first = static_cast<int>(model.position(s, c, s + 1));
  for (size_t i = 0; i < ends.size() && ends[i] < t; ++i) {
    if (!model.is_end(ends[i], t)) continue;
    Way way;
    way.split = ends[i];
    way.ms = model.forward(s, ends[i]);
    way.own_bytes = context.own_bytes + drops[i].bytes + model.gradient(t);
    way.rest = static_cast<int>(model.position(ends[i], drops[i].context, t));
    way.rest_held = context.own_bytes;
    way.front = first + static_cast<int>(i);
    way.front_held = output;
    visit(way);
  }
}

/// Bounds on the memory of every interval, to the byte, by its position in the
/// model. They alone decide whether something fits.
class MemoryBounds {
 public:
  explicit MemoryBounds(const ChainModel& model);

  /// The least memory to reverse the interval.
  int64_t least(int position) const { return least_[at(position)]; }
  /// The same if it is reversed this way.
  int64_t least(const Way& way) const {
    int64_t bytes = way.own_bytes;
    if (way.rest >= 0) bytes = std::max(bytes, least(way.rest) + way.rest_held);
    if (way.front >= 0) {
      bytes = std::max(bytes, least(way.front) + way.front_held);
    }
    return bytes;
  }
  /// The least memory to keep every stage, each as one of its fastest variants;
  /// more than anything else if the model has no such way.
  int64_t enough(int position) const { return enough_[at(position)]; }
  /// The least that is held by others while the interval is reversed.
  int64_t held(int position) const { return held_[at(position)]; }

  int whole() const { return whole_; }
  /// The whole chain with the least memory, whatever time that takes.
  std::vector<Op> least_ops() const;
  /// The whole chain with every stage kept, in the least time.
  std::vector<Op> fastest_ops() const;

 private:
  static size_t at(int position) { return static_cast<size_t>(position); }
  int64_t enough(const Way& way) const;
  void find_held();

  const ChainModel* model_;
  int whole_;
  std::vector<int64_t> least_, enough_, held_;
};

/// Writes the schedule of the chain: `choose(s, c, t, bytes)` gives the way to
/// reverse [s, t) in context c with so many bytes.
template <class Choose>
class ScheduleWriter {
 public:
  ScheduleWriter(const ChainModel& model, Choose choose)
      : model_(model), choose_(std::move(choose)) {}

  std::vector<Op> write(int64_t bytes) {
    reverse(0, 0, model_.stages, bytes);
    return std::move(ops_);
  }

 private:
  void reverse(int s, int c, int t, int64_t bytes) {
    const Way way = choose_(s, c, t, bytes);
    if (way.keep >= 0) {
      const Keep& keep =
          model_.context(s, c).keeps[static_cast<size_t>(way.keep)];
      ops_.push_back({OpKind::kForwardKeep, s, keep.variant});
      if (s + 1 < t) {
        reverse(s + 1, keep.next, t, bytes - way.rest_held);
      } else if (t != model_.stages) {
        ops_.push_back({OpKind::kDiscard, t});
      }
      ops_.push_back({OpKind::kBackward, s});
      return;
    }
    for (int i = s; i < way.split; ++i) {
      ops_.push_back(
          {i == s ? OpKind::kForwardKeepInput : OpKind::kForwardDrop, i});
    }
    reverse(way.split, model_.drop(s, way.split).context, t,
            bytes - way.rest_held);
    reverse(s, c, way.split, bytes - way.front_held);
  }

  const ChainModel& model_;
  Choose choose_;
  std::vector<Op> ops_;
};

}  // namespace reprise::detail
