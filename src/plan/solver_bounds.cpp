#include "plan/solver_bounds.h"

#include <limits>

namespace reprise::detail {
namespace {

// A quarter of the maximum, so that sums of a few do not overflow.
constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max() / 4;

}  // namespace

MemoryBounds::MemoryBounds(const ChainModel& model)
    : model_(&model),
      whole_(static_cast<int>(model.position(0, 0, model.stages))),
      min_bytes_(model.positions(), kUnbounded),
      keep_all_bytes_(model.positions(), kUnbounded),
      held_bytes_(model.positions(), kUnbounded) {
  for_each_interval(model, [&](int s, int c, int t) {
    const size_t position = model.position(s, c, t);
    int64_t bytes = kUnbounded;
    int64_t kept_bytes = kUnbounded;
    const float fastest = model.fastest_ms(s, c, t);
    for_each_reversal(model, s, c, t, [&](const Reversal& reversal) {
      bytes = std::min(bytes, min_bytes(reversal));
      if (reversal.kept_run < 0 || reversal.ms > fastest) return;
      kept_bytes = std::min(kept_bytes, keep_all_bytes(reversal));
    });
    min_bytes_[position] = bytes;
    keep_all_bytes_[position] = kept_bytes;
  });
  compute_held_bytes();
}

/// For a reversal that keeps the first stage of the interval.
int64_t MemoryBounds::keep_all_bytes(const Reversal& reversal) const {
  if (reversal.rest < 0) return reversal.own_bytes;
  return std::max(reversal.own_bytes,
                  keep_all_bytes(reversal.rest) + reversal.rest_held);
}

/// Propagates from each interval to the smaller ones of its reversals, largest
/// first.
void MemoryBounds::compute_held_bytes() {
  held_bytes_[at(whole_)] = 0;
  for (int t = model_->stages; t > 0; --t) {
    for (int s = 0; s < t; ++s) {
      if (!model_->is_end(s, t)) continue;
      const auto contexts = model_->contexts[static_cast<size_t>(s)].size();
      for (int c = 0; c < static_cast<int>(contexts); ++c) {
        const int64_t held = held_bytes_[model_->position(s, c, t)];
        if (held >= kUnbounded) continue;
        const auto lower = [&](int part, int64_t bytes) {
          if (part < 0) return;
          held_bytes_[at(part)] = std::min(held_bytes_[at(part)], bytes);
        };
        for_each_reversal(*model_, s, c, t, [&](const Reversal& reversal) {
          lower(reversal.rest, held + reversal.rest_held);
          lower(reversal.front, held + reversal.front_held);
        });
      }
    }
  }
}

std::vector<Op> MemoryBounds::smallest_ops() const {
  const auto choose = [&](int s, int c, int t, int64_t) {
    Reversal best;
    int64_t bytes = kUnbounded;
    for_each_reversal(*model_, s, c, t, [&](const Reversal& reversal) {
      if (min_bytes(reversal) >= bytes) return;
      bytes = min_bytes(reversal);
      best = reversal;
    });
    return best;
  };
  return ScheduleBuilder(*model_, choose).build(0);
}

std::vector<Op> MemoryBounds::fastest_ops() const {
  const auto choose = [&](int s, int c, int t, int64_t) {
    Reversal best;
    int64_t bytes = kUnbounded;
    const float fastest = model_->fastest_ms(s, c, t);
    for_each_reversal(*model_, s, c, t, [&](const Reversal& reversal) {
      if (reversal.kept_run < 0 || reversal.ms > fastest ||
          keep_all_bytes(reversal) >= bytes)
        return;
      bytes = keep_all_bytes(reversal);
      best = reversal;
    });
    return best;
  };
  return ScheduleBuilder(*model_, choose).build(0);
}

}  // namespace reprise::detail
