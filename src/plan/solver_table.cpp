#include "plan/solver_table.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

namespace reprise::detail {
namespace {

constexpr float kNever = std::numeric_limits<float>::infinity();
constexpr int kBlock = 1 << 18;     // floats per allocation
constexpr int kStride = 32;         // slots compared together
constexpr int kMaxSlots = 1 << 16;  // between the minimum memory and the reach

/// Divides positive numbers below 2^52. Floating-point division is exact for
/// them and faster.
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
      slot_bytes_(choose_slot_bytes(limits)),
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
        row.min_bytes = bounds_->min_bytes(position);
        row.keep_all_bytes = bounds_->keep_all_bytes(position);
        row.before_bytes = before;
        row.first_slot = slot_of(row, row.min_bytes);
      }
    }
    const KeptRun& run = model_->context(s, kept).kept_runs.front();
    before += run.held_bytes;
    kept = run.next;
  }
}

/// Returns the memory above its minimum that makes a difference to an interval,
/// or a negative number if the interval cannot occur.
int64_t TimeTable::range(int position) const {
  const int64_t held = bounds_->held_bytes(position);
  const int64_t least = bounds_->min_bytes(position);
  if (held > reach_bytes_ - least) return -1;
  return std::min(reach_bytes_ - held, bounds_->keep_all_bytes(position)) -
         least;
}

/// Returns the slot of `bytes`, counted from the beginning of the interval's
/// slots.
int64_t TimeTable::slot_of(const Row& row, int64_t bytes) const {
  return divide(bytes + row.before_bytes, slot_bytes_);
}

/// Returns the size of a slot with which the table stays within its limits.
int64_t TimeTable::choose_slot_bytes(const TableLimits& limits) const {
  double additions = 0, cells = 0;  // multiplied by the size of a slot
  int64_t widest = 0;
  for_each_interval(*model_, [&](int s, int c, int t) {
    const int64_t bytes = range(static_cast<int>(model_->position(s, c, t)));
    if (bytes <= 0) return;
    const auto reversals = static_cast<double>(
        model_->end_index(s, t) + model_->context(s, c).kept_runs.size());
    additions += reversals * static_cast<double>(bytes);
    cells += static_cast<double>(bytes);
    widest = std::max(widest, bytes);
  });
  const double slot =
      std::max({additions / limits.additions,
                cells * sizeof(float) / static_cast<double>(limits.bytes),
                static_cast<double>(widest) /
                    (limits.slots > 0 ? limits.slots : kMaxSlots)});
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
      divide_up(row.min_bytes + more + row.before_bytes, slot_bytes_) -
      row.first_slot + 1);
  best_.assign(static_cast<size_t>(count), kNever);
  const auto kept_runs =
      static_cast<int>(model_->context(s, c).kept_runs.size());
  for_each_reversal(*model_, s, c, t, [&](const Reversal& reversal) {
    add(reversal, row, count);
    if (reversal.kept_run + 1 != kept_runs ||
        row.min_bytes + more < row.keep_all_bytes)
      return;
    // Splits only add time, so they are useless once all stages are kept.
    const float fastest =
        *std::min_element(best_.begin(), best_.begin() + count);
    if (fastest == kNever) return;
    while (count > 1 && best_[static_cast<size_t>(count) - 2] <= fastest) {
      --count;
    }
  });
  finish(row, count);
}

/// Returns the times of an interval from slot k of the larger interval `whole`,
/// which holds `held` bytes meanwhile.
TimeTable::Part TimeTable::part(int position, const Row& whole, int k,
                                int64_t held) const {
  static const float kZero = 0;
  if (position < 0) return {&kZero, 1, 0};
  const Row& row = rows_[static_cast<size_t>(position)];
  if (row.count == 0) return {nullptr, 0, kNever};
  const int64_t bytes =
      k == 0 ? whole.min_bytes
             : (whole.first_slot + k) * slot_bytes_ - whole.before_bytes;
  // The minimum memory is exact. Other amounts are rounded to the nearest slot.
  const int64_t slot =
      slot_of(row, bytes - held + (k == 0 ? 0 : slot_bytes_ / 2));
  const int64_t from = std::max<int64_t>(slot - row.first_slot, 0);
  // With enough memory to keep all stages, the last time applies despite
  // rounding.
  const int64_t missing = row.keep_all_bytes + held - bytes;
  const int64_t until = missing > 0 ? divide_up(missing, slot_bytes_) : 0;
  const int64_t count = std::min(row.count - from, until);
  return {row.ms + from, static_cast<int>(std::max<int64_t>(count, 0)),
          row.ms[row.count - 1]};
}

/// Adds one reversal to the row being filled, of which `count` slots are
/// useful.
void TimeTable::add(const Reversal& reversal, const Row& row, int count) {
  const int64_t need = bounds_->min_bytes(reversal);
  if (need == row.min_bytes) add_from(reversal, row, 0, 1);
  const int64_t low = std::max<int64_t>(
      divide_up(need + row.before_bytes, slot_bytes_) - row.first_slot, 1);
  if (low < count) add_from(reversal, row, static_cast<int>(low), count);
}

/// Adds the times from slot k to slot `end`.
void TimeTable::add_from(const Reversal& reversal, const Row& row, int k,
                         int end) {
  const Part rest = part(reversal.rest, row, k, reversal.rest_held);
  const Part front = part(reversal.front, row, k, reversal.front_held);
  const float min_ms = reversal.ms + rest.min_ms + front.min_ms;
  float* best = best_.data() + k;
  if (min_ms >= *best) return;
  // There is nothing to gain once a time as short as the minimum is known.
  const auto known =
      std::lower_bound(best, best_.data() + end, min_ms,
                       [](float time, float bound) { return time > bound; });
  const int all = static_cast<int>(known - best);
  const int rest_end = std::min(rest.count, all);
  const int front_end = std::min(front.count, all);
  const int both = std::min(rest_end, front_end);
  int m = 0;
  while (m < both) {
    const int stop = std::min(m + kStride, both);
    // Times descend: if the last one is not shorter than the first known, none
    // is.
    if (reversal.ms + rest.ms[stop - 1] + front.ms[stop - 1] >= best[m]) {
      m = stop;
      continue;
    }
    for (; m < stop; ++m) {
      const float time = reversal.ms + rest.ms[m] + front.ms[m];
      best[m] = time < best[m] ? time : best[m];
    }
  }
  const float besides_rest = reversal.ms + front.min_ms;
  for (; m < rest_end; ++m) {
    const float time = besides_rest + rest.ms[m];
    best[m] = time < best[m] ? time : best[m];
  }
  const float besides_front = reversal.ms + rest.min_ms;
  for (; m < front_end; ++m) {
    const float time = besides_front + front.ms[m];
    best[m] = time < best[m] ? time : best[m];
  }
  // finish() copies this time to the slots above.
  if (m < all) best[m] = std::min(best[m], min_ms);
}

/// Stores the part of the row in which times descend.
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
  const int64_t slot = slot_of(row, bytes) - row.first_slot;
  if (slot >= row.count - 1 || bytes >= row.keep_all_bytes) {
    return row.ms[row.count - 1];
  }
  const float ms = row.ms[slot];
  if (between == Between::kLower) return ms;
  const int64_t from =
      slot == 0 ? row.min_bytes
                : (row.first_slot + slot) * slot_bytes_ - row.before_bytes;
  const int64_t to =
      (row.first_slot + slot + 1) * slot_bytes_ - row.before_bytes;
  const float part =
      static_cast<float>(bytes - from) / static_cast<float>(to - from);
  return ms + part * (row.ms[slot + 1] - ms);
}

std::vector<Op> TimeTable::ops(int64_t bytes, Between between) const {
  const auto choose = [&](int s, int c, int t, int64_t left) {
    Reversal best;
    float least = kNever;
    for_each_reversal(*model_, s, c, t, [&](const Reversal& reversal) {
      if (bounds_->min_bytes(reversal) > left) return;
      const float ms = reversal.ms +
                       at(reversal.rest, left - reversal.rest_held, between) +
                       at(reversal.front, left - reversal.front_held, between);
      if (ms >= least) return;
      least = ms;
      best = reversal;
    });
    TORCH_INTERNAL_ASSERT(best.kept_run >= 0 || best.split >= 0);
    return best;
  };
  return ScheduleBuilder(*model_, choose).build(bytes);
}

}  // namespace reprise::detail
