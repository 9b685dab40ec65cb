#include "plan/solver_table.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

namespace reprise::detail {
namespace {

constexpr float kNever = std::numeric_limits<float>::infinity();
constexpr int kBlock = 1 << 18;      // floats
constexpr int kStride = 32;          // slots looked at together
constexpr int kMostSlots = 1 << 16;  // between the least memory and the reach

/// The quotient of two positive numbers below 2^52, for which the faster
/// division is exact.
int64_t divide(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<double>(a) / static_cast<double>(b));
}

int64_t divide_up(int64_t a, int64_t b) {
  return divide(a + b - 1, b);
}

}  // namespace

TimeTable::TimeTable(const ChainModel& model, const MemoryBounds& bounds,
                     int64_t reach_bytes, const TableLimits& limits)
    : model_(&model),
      bounds_(&bounds),
      reach_bytes_(reach_bytes),
      slot_bytes_(choose_slots(limits)),
      rows_(model.positions()) {
  prepare_rows();
  for_each_interval(model, [&](int s, int c, int t) { fill(s, c, t); });
  best_ = {};
}

void TimeTable::prepare_rows() {
  int64_t before = 0;
  for (int s = 0, kept = 0; s < model_->stages; ++s) {
    const auto contexts = model_->contexts[static_cast<size_t>(s)].size();
    for (int c = 0; c < static_cast<int>(contexts); ++c) {
      for (const int t : model_->ends_of(s)) {
        const auto position = static_cast<int>(model_->position(s, c, t));
        Row& row = rows_[static_cast<size_t>(position)];
        row.least = bounds_->least(position);
        row.enough = bounds_->enough(position);
        row.before = before;
        row.first = slot_of(row, row.least);
      }
    }
    const Keep& keep = model_->context(s, kept).keeps.front();
    before += keep.held_bytes;
    kept = keep.next;
  }
}

/// How much more memory than its least makes a difference to an interval;
/// negative if it cannot occur.
int64_t TimeTable::range(int position) const {
  const int64_t held = bounds_->held(position);
  const int64_t least = bounds_->least(position);
  if (held > reach_bytes_ - least) return -1;
  return std::min(reach_bytes_ - held, bounds_->enough(position)) - least;
}

/// Counted from where slots begin for the interval.
int64_t TimeTable::slot_of(const Row& row, int64_t bytes) const {
  return divide(bytes + row.before, slot_bytes_);
}

/// The size of a slot with which the table stays within its limits.
int64_t TimeTable::choose_slots(const TableLimits& limits) const {
  double additions = 0, cells = 0;  // times bytes of a slot
  int64_t widest = 0;
  for_each_interval(*model_, [&](int s, int c, int t) {
    const int64_t bytes = range(static_cast<int>(model_->position(s, c, t)));
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
  // All sizes are multiples of the unit: one unit per slot is exact.
  return (slot <= static_cast<double>(limits.unit_bytes) ? 1 : units) *
         limits.unit_bytes;
}

void TimeTable::fill(int s, int c, int t) {
  const size_t at = model_->position(s, c, t);
  const int64_t more = range(static_cast<int>(at));
  if (more < 0) return;
  Row& row = rows_[at];
  auto count = static_cast<int>(
      divide_up(row.least + more + row.before, slot_bytes_) - row.first + 1);
  best_.assign(static_cast<size_t>(count), kNever);
  const auto keeps = static_cast<int>(model_->context(s, c).keeps.size());
  for_each_way(*model_, s, c, t, [&](const Way& way) {
    add(way, row, count);
    if (way.keep + 1 != keeps || row.least + more < row.enough) return;
    // Splits only add time: they are of no use from where all is kept.
    const float fastest =
        *std::min_element(best_.begin(), best_.begin() + count);
    if (fastest == kNever) return;
    while (count > 1 && best_[static_cast<size_t>(count) - 2] <= fastest) {
      --count;
    }
  });
  finish(row, count);
}

/// The times of an interval from slot k of `whole` on, which it is a part of and
/// which holds `held` besides.
TimeTable::Part TimeTable::part(int position, const Row& whole, int k,
                                int64_t held) const {
  static const float kZero = 0;
  if (position < 0) return {&kZero, 1, 0};
  const Row& row = rows_[static_cast<size_t>(position)];
  if (row.count == 0) return {nullptr, 0, kNever};
  const int64_t bytes =
      k == 0 ? whole.least : (whole.first + k) * slot_bytes_ - whole.before;
  // The least memory is exact, the others are to the nearest slot.
  const int64_t slot =
      slot_of(row, bytes - held + (k == 0 ? 0 : slot_bytes_ / 2));
  const int64_t from = std::max<int64_t>(slot - row.first, 0);
  // With enough to keep all stages the last time holds, however it is rounded.
  const int64_t missing = row.enough + held - bytes;
  const int64_t until = missing > 0 ? divide_up(missing, slot_bytes_) : 0;
  const int64_t count = std::min(row.count - from, until);
  return {row.ms + from, static_cast<int>(std::max<int64_t>(count, 0)),
          row.ms[row.count - 1]};
}

/// Adds one way to the row being made, of which `count` slots are of use.
void TimeTable::add(const Way& way, const Row& row, int count) {
  const int64_t need = bounds_->least(way);
  if (need == row.least) add_from(way, row, 0, 1);
  const int64_t low = std::max<int64_t>(
      divide_up(need + row.before, slot_bytes_) - row.first, 1);
  if (low < count) add_from(way, row, static_cast<int>(low), count);
}

/// From slot k on to slot `end`.
void TimeTable::add_from(const Way& way, const Row& row, int k, int end) {
  const Part rest = part(way.rest, row, k, way.rest_held);
  const Part front = part(way.front, row, k, way.front_held);
  const float least_ms = way.ms + rest.least + front.least;
  float* best = best_.data() + k;
  if (least_ms >= *best) return;
  // Nothing to gain from where a time as good as its best is known already.
  const auto known =
      std::lower_bound(best, best_.data() + end, least_ms,
                       [](float time, float bound) { return time > bound; });
  const int all = static_cast<int>(known - best);
  const int rest_end = std::min(rest.count, all);
  const int front_end = std::min(front.count, all);
  const int both = std::min(rest_end, front_end);
  int m = 0;
  while (m < both) {
    const int stop = std::min(m + kStride, both);
    // Times fall: if the last is no gain over the first known, none is.
    if (way.ms + rest.ms[stop - 1] + front.ms[stop - 1] >= best[m]) {
      m = stop;
      continue;
    }
    for (; m < stop; ++m) {
      const float time = way.ms + rest.ms[m] + front.ms[m];
      best[m] = time < best[m] ? time : best[m];
    }
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
  const int64_t slot = slot_of(row, bytes) - row.first;
  if (slot >= row.count - 1 || bytes >= row.enough) {
    return row.ms[row.count - 1];
  }
  const float ms = row.ms[slot];
  if (between == Between::kLower) return ms;
  const int64_t from =
      slot == 0 ? row.least : (row.first + slot) * slot_bytes_ - row.before;
  const int64_t to = (row.first + slot + 1) * slot_bytes_ - row.before;
  const float part =
      static_cast<float>(bytes - from) / static_cast<float>(to - from);
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

}  // namespace reprise::detail
