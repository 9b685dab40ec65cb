#include "plan/solver_least.h"

#include <limits>

namespace reprise::detail {
namespace {

// A quarter, so that sums of a few stay numbers.
constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max() / 4;

}  // namespace

MemoryBounds::MemoryBounds(const ChainModel& model)
    : model_(&model),
      whole_(static_cast<int>(model.position(0, 0, model.stages))),
      least_(model.positions(), kUnbounded),
      enough_(model.positions(), kUnbounded),
      held_(model.positions(), kUnbounded) {
  for_each_interval(model, [&](int s, int c, int t) {
    const size_t position = model.position(s, c, t);
    int64_t bytes = kUnbounded;
    int64_t enough_bytes = kUnbounded;
    const float fastest = model.context(s, c).fastest_ms();
    for_each_way(model, s, c, t, [&](const Way& way) {
      bytes = std::min(bytes, least(way));
      if (way.keep < 0 || way.ms > fastest) return;
      enough_bytes = std::min(enough_bytes, enough(way));
    });
    least_[position] = bytes;
    enough_[position] = enough_bytes;
  });
  find_held();
}

/// For a way that keeps the interval's first stage.
int64_t MemoryBounds::enough(const Way& way) const {
  if (way.rest < 0) return way.own_bytes;
  return std::max(way.own_bytes, enough(way.rest) + way.rest_held);
}

/// From each interval to the parts of its ways, the larger intervals first.
void MemoryBounds::find_held() {
  held_[at(whole_)] = 0;
  for (int t = model_->stages; t > 0; --t) {
    for (int s = 0; s < t; ++s) {
      if (!model_->is_end(s, t)) continue;
      const auto contexts = model_->contexts[static_cast<size_t>(s)].size();
      for (int c = 0; c < static_cast<int>(contexts); ++c) {
        const int64_t held = held_[model_->position(s, c, t)];
        if (held >= kUnbounded) continue;
        const auto note = [&](int part, int64_t bytes) {
          if (part < 0) return;
          held_[at(part)] = std::min(held_[at(part)], bytes);
        };
        for_each_way(*model_, s, c, t, [&](const Way& way) {
          note(way.rest, held + way.rest_held);
          note(way.front, held + way.front_held);
        });
      }
    }
  }
}

std::vector<Op> MemoryBounds::least_ops() const {
  const auto choose = [&](int s, int c, int t, int64_t) {
    Way best;
    int64_t bytes = kUnbounded;
    for_each_way(*model_, s, c, t, [&](const Way& way) {
      if (least(way) >= bytes) return;
      bytes = least(way);
      best = way;
    });
    return best;
  };
  return ScheduleWriter(*model_, choose).write(0);
}

std::vector<Op> MemoryBounds::fastest_ops() const {
  const auto choose = [&](int s, int c, int t, int64_t) {
    Way best;
    int64_t bytes = kUnbounded;
    const float fastest = model_->context(s, c).fastest_ms();
    for_each_way(*model_, s, c, t, [&](const Way& way) {
      if (way.keep < 0 || way.ms > fastest || enough(way) >= bytes) return;
      bytes = enough(way);
      best = way;
    });
    return best;
  };
  return ScheduleWriter(*model_, choose).write(0);
}

}  // namespace reprise::detail
