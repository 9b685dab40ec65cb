#include "solver_table.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

namespace reprise::plan {
namespace {

constexpr float kNever = std::numeric_limits<float>::infinity();
constexpr int kBlock = 1 << 18;     // floats
constexpr int kMostSlots = 1 << 16;  // between the least memory and the reach

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

TimeTable::TimeTable(const ChainModel& model, const MemoryBounds& bounds,
                     int64_t reach_bytes, const TableLimits& limits)
    : model_(&model),
      bounds_(&bounds),
      reach_bytes_(reach_bytes),
      slot_bytes_(choose_slots(limits)),
      rows_(model.positions()) {
  for_each_interval(model, [&](int s, int c, int t) { fill(s, c, t); });
  best_ = {};
}

/// How much more memory than its least makes a difference to an interval;
/// negative if it cannot occur.
int64_t TimeTable::range(int position) const {
  const int64_t held = bounds_->held(position);
  const int64_t least = bounds_->least(position);
  if (held > reach_bytes_ - least) return -1;
  return std::min(reach_bytes_ - held, bounds_->enough(position)) - least;
}

int TimeTable::row_length(int position) const {
  const int64_t bytes = range(position);
  return bytes < 0 ? 0 : static_cast<int>(divide_up(bytes, slot_bytes_)) + 1;
}

/// The size of a slot with which the table stays within its limits.
int64_t TimeTable::choose_slots(const TableLimits& limits) const {
  double additions = 0, cells = 0;  // times bytes of a slot
  int64_t widest = 0;
  for_each_interval(*model_, [&](int s, int c, int t) {
    const int64_t bytes =
        range(static_cast<int>(model_->position(s, c, t)));
    if (bytes <= 0) return;
    const auto ways = static_cast<double>(model_->end_index(s, t) +
                                          model_->context(s, c).keeps.size());
    additions += ways * static_cast<double>(bytes);
    cells += static_cast<double>(bytes);
    widest = std::max(widest, bytes);
  });
  const double slot =
      std::max({additions / limits.additions,
                cells * sizeof(float) / static_cast<double>(limits.bytes),
                static_cast<double>(widest) /
                    (limits.slots > 0 ? limits.slots : kMostSlots)});
  const int64_t units =
      divide_up(static_cast<int64_t>(slot) + 1, limits.unit_bytes);
  // All sizes are multiples of the unit: one unit a slot is exact.
  return (slot <= static_cast<double>(limits.unit_bytes) ? 1 : units) *
         limits.unit_bytes;
}

void TimeTable::fill(int s, int c, int t) {
  const auto position = static_cast<int>(model_->position(s, c, t));
  int count = row_length(position);
  if (count == 0) return;
  best_.assign(static_cast<size_t>(count), kNever);
  const int64_t least = bounds_->least(position);
  const auto keeps = static_cast<int>(model_->context(s, c).keeps.size());
  for_each_way(*model_, s, c, t, [&](const Way& way) {
    add(way, least, count);
    if (way.keep + 1 < keeps) return;
    // Splits only add time: they are of no use from where all is kept.
    const auto end = best_.begin() + count;
    const float fastest = *std::min_element(best_.begin(), end);
    if (fastest == kNever) return;
    while (count > 1 && best_[static_cast<size_t>(count) - 2] <= fastest) {
      --count;
    }
  });
  finish(rows_[static_cast<size_t>(position)], count);
}

/// The times of an interval that has `bytes` and more.
TimeTable::Part TimeTable::part(int position, int64_t bytes) const {
  static const float kZero = 0;
  if (position < 0) return {&kZero, 1, 0};
  const Row& row = rows_[static_cast<size_t>(position)];
  if (row.count == 0) return {nullptr, 0, kNever};
  const int64_t more = bytes - bounds_->least(position);
  const int64_t from = (more + slot_bytes_ / 2) / slot_bytes_;
  // With enough to keep all stages the last time holds, however it is rounded.
  const int64_t until =
      divide_up(bounds_->enough(position) - bytes, slot_bytes_);
  const int64_t count = std::min(row.count - from, until);
  return {row.ms + from, static_cast<int>(std::max<int64_t>(count, 0)),
          row.ms[row.count - 1]};
}

/// Adds one way to the row being made, up to `count` slots.
void TimeTable::add(const Way& way, int64_t least, int count) {
  const int64_t need = bounds_->least(way);
  const int64_t low = divide_up(need - least, slot_bytes_);
  if (low >= count) return;
  const int64_t bytes = least + low * slot_bytes_;
  const Part rest = part(way.rest, bytes - way.rest_held);
  const Part front = part(way.front, bytes - way.front_held);
  const float least_ms = way.ms + rest.least + front.least;
  float* best = best_.data() + low;
  if (least_ms >= *best) return;
  // Nothing to gain from where a time as good as its best is known already.
  const auto known =
      std::lower_bound(best, best_.data() + count, least_ms,
                       [](float time, float bound) { return time > bound; });
  const int all = static_cast<int>(known - best);
  const int rest_end = std::min(rest.count, all);
  const int front_end = std::min(front.count, all);
  const int both = std::min(rest_end, front_end);
  int m = 0;
  for (; m < both; ++m) {
    const float time = way.ms + rest.ms[m] + front.ms[m];
    best[m] = time < best[m] ? time : best[m];
  }
  const float besides_rest = way.ms + front.least;
  for (; m < rest_end; ++m) {
    const float time = besides_rest + rest.ms[m];
    best[m] = time < best[m] ? time : best[m];
  }
  const float besides_front = way.ms + rest.least;
  for (; m < front_end; ++m) {
    const float time = besides_front + front.ms[m];
    best[m] = time < best[m] ? time : best[m];
  }
  // The same above, which finish() sees to.
  if (m < all) best[m] = std::min(best[m], least_ms);
}

/// Keeps the part of the row in which times fall.
void TimeTable::finish(Row& row, int count) {
  float least = kNever;
  int last = 0;
  for (int m = 0; m < count; ++m) {
    float& time = best_[static_cast<size_t>(m)];
    if (time < least) {
      least = time;
      last = m;
    }
    time = least;
  }
  TORCH_INTERNAL_ASSERT(least < kNever);
  row.count = last + 1;
  float* ms = allocate(row.count);
  std::copy_n(best_.begin(), row.count, ms);
  row.ms = ms;
}

float* TimeTable::allocate(int count) {
  if (block_left_ < count) {
    const int size = std::max(kBlock, count);
    blocks_.push_back(std::make_unique<float[]>(static_cast<size_t>(size)));
    block_left_ = size;
    allocated_ += int64_t{size} * static_cast<int64_t>(sizeof(float));
  }
  block_left_ -= count;
  return blocks_.back().get() + block_left_;
}

int64_t TimeTable::table_bytes() const {
  return allocated_ + static_cast<int64_t>(rows_.size() * sizeof(Row));
}

float TimeTable::at(int position, int64_t bytes, Between between) const {
  if (position < 0) return 0;
  const Row& row = rows_[static_cast<size_t>(position)];
  const int64_t more = bytes - bounds_->least(position);
  const int64_t slot = more / slot_bytes_;
  if (slot >= row.count - 1 || bytes >= bounds_->enough(position)) {
    return row.ms[row.count - 1];
  }
  const float ms = row.ms[slot];
  if (between == Between::kLower) return ms;
  const auto part = static_cast<float>(more - slot * slot_bytes_) /
                    static_cast<float>(slot_bytes_);
  return ms + part * (row.ms[slot + 1] - ms);
}

std::vector<Op> TimeTable::ops(int64_t bytes, Between between) const {
  const auto choose = [&](int s, int c, int t, int64_t left) {
    Way best;
    float least = kNever;
    for_each_way(*model_, s, c, t, [&](const Way& way) {
      if (bounds_->least(way) > left) return;
      const float ms = way.ms + at(way.rest, left - way.rest_held, between) +
                       at(way.front, left - way.front_held, between);
      if (ms >= least) return;
      least = ms;
      best = way;
    });
    TORCH_INTERNAL_ASSERT(best.keep >= 0 || best.split >= 0);
    return best;
  };
  return ScheduleWriter(*model_, choose).write(bytes);
}

}  // namespace reprise::plan
