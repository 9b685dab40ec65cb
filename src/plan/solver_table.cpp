#include "solver_table.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

namespace reprise::plan {
namespace {

constexpr float kNever = std::numeric_limits<float>::infinity();
constexpr int kBlock = 1 << 18;  // floats

/// Writes the operations that `chooser` decides for.
template <class Chooser>
class Writer {
 public:
  Writer(const ChainModel& model, const Chooser& chooser)
      : model_(model), chooser_(chooser) {}

  std::vector<Op> write(int64_t memory) {
    reverse(0, 0, model_.stages, memory);
    return std::move(ops_);
  }

 private:
  void reverse(int s, int c, int t, int64_t memory) {
    const Choice choice = chooser_.choose(s, c, t, memory);
    TORCH_INTERNAL_ASSERT(choice.keep >= 0 || choice.split >= 0);
    if (choice.keep >= 0) {
      keep(s, c, t, choice);
      return;
    }
    const int split = choice.split;
    for (int i = s; i < split; ++i) {
      ops_.push_back(
          {i == s ? OpKind::kForwardKeepInput : OpKind::kForwardDrop, i});
    }
    reverse(split, model_.drop(s, split).context, t, choice.rest);
    reverse(s, c, choice.split, choice.front);
  }

  void keep(int s, int c, int t, const Choice& choice) {
    const Keep& keep =
        model_.context(s, c).keeps[static_cast<size_t>(choice.keep)];
    ops_.push_back({OpKind::kForwardKeep, s, keep.variant});
    if (s + 1 < t) {
      reverse(s + 1, keep.next, t, choice.rest);
    } else if (t != model_.stages) {
      ops_.push_back({OpKind::kDiscard, s + 1});
    }
    ops_.push_back({OpKind::kBackward, s});
  }

  const ChainModel& model_;
  const Chooser& chooser_;
  std::vector<Op> ops_;
};

/// Calls `fill(s, c, t)` for every interval after those it is made of.
template <class F>
void for_each_interval(const ChainModel& model, F&& fill) {
  for (int t = 1; t <= model.stages; ++t) {
    for (int s = t - 1; s >= 0 && model.is_end(s, t); --s) {
      const auto contexts = model.contexts[static_cast<size_t>(s)].size();
      for (int c = 0; c < static_cast<int>(contexts); ++c) fill(s, c, t);
    }
  }
}

}  // namespace

LeastMemory::LeastMemory(const ChainModel& model)
    : model_(&model), bytes_(model.positions()) {
  for_each_interval(model, [&](int s, int c, int t) {
    const Choice choice = choose(s, c, t, 0);
    at(s, c, t) =
        choice.keep >= 0
            ? keep_bytes(
                  s,
                  model.context(s, c).keeps[static_cast<size_t>(choice.keep)],
                  t)
            : split_bytes(s, c, t, choice.split);
  });
}

int64_t& LeastMemory::at(int s, int c, int t) {
  return bytes_[model_->position(s, c, t)];
}

int64_t LeastMemory::at(int s, int c, int t) const {
  return bytes_[model_->position(s, c, t)];
}

int64_t LeastMemory::bytes() const {
  return at(0, 0, model_->stages);
}

std::vector<Op> LeastMemory::ops() const {
  return Writer(*model_, *this).write(0);
}

int64_t LeastMemory::keep_bytes(int s, const Keep& keep, int t) const {
  const int64_t bytes = std::max(keep.forward_bytes + model_->gradient(t),
                                 model_->backward_bytes(s, keep, t));
  if (s + 1 == t) return bytes;
  return std::max(bytes, keep.held_bytes + at(s + 1, keep.next, t));
}

int64_t LeastMemory::split_bytes(int s, int c, int t, int split) const {
  const Drop& drop = model_->drop(s, split);
  const int64_t own = model_->context(s, c).own_bytes;
  const int64_t output = t == model_->stages ? model_->output_bytes : 0;
  return std::max({own + drop.bytes + model_->gradient(t),
                   own + at(split, drop.context, t), at(s, c, split) + output});
}

Choice LeastMemory::choose(int s, int c, int t, int64_t) const {
  Choice best;
  int64_t least = std::numeric_limits<int64_t>::max();
  const auto& keeps = model_->context(s, c).keeps;
  for (size_t k = 0; k < keeps.size(); ++k) {
    const int64_t bytes = keep_bytes(s, keeps[k], t);
    if (bytes < least) best = {static_cast<int>(k), -1, 0, 0};
    least = std::min(least, bytes);
  }
  for (const int split : model_->ends_of(s)) {
    if (split >= t) break;
    const int64_t bytes = split_bytes(s, c, t, split);
    if (bytes < least) best = {-1, split, 0, 0};
    least = std::min(least, bytes);
  }
  return best;
}

TimeTable::TimeTable(const ChainModel& model, int64_t slot_bytes, int slots)
    : model_(&model),
      slot_bytes_(slot_bytes),
      slots_(slots),
      held_before_{0},
      rows_(model.positions()),
      best_(static_cast<size_t>(slots) + 1) {
  for (int s = 0, c = 0; s < model.stages; ++s) {
    const Keep& keep = model.context(s, c).keeps.front();
    held_before_.push_back(held_before_.back() + keep.held_bytes);
    c = keep.next;
  }
  std::vector<float> fastest(static_cast<size_t>(model.stages) + 1);
  for_each_interval(model, [&](int s, int c, int t) {
    const auto at = static_cast<size_t>(s);
    const bool first = s + 1 == t;
    float one = kNever;
    for (const Keep& keep : model.context(s, c).keeps) {
      one = std::min(one, keep.ms);
    }
    fastest[at] = one + (first ? 0 : fastest[at + 1]);
    fill(s, c, t, fastest[at]);
  });
}

float TimeTable::Row::at(int64_t slots) const {
  if (count == 0 || slots < low) return kNever;
  return ms[std::min<int64_t>(slots - low, count - 1)];
}

float TimeTable::Candidate::at(int64_t slots) const {
  if (slots < low) return kNever;
  // In the order of add(), so that both round alike.
  float time = ms;
  if (rest != nullptr) time += rest->at(slots - rest_shift);
  if (front != nullptr) time += front->at(slots - front_shift);
  return time;
}

const TimeTable::Row& TimeTable::row(int s, int c, int t) const {
  return rows_[model_->position(s, c, t)];
}

int TimeTable::up(int64_t bytes) const {
  const int64_t slots = (bytes + slot_bytes_ - 1) / slot_bytes_;
  return static_cast<int>(std::min<int64_t>(slots, slots_ + 1));
}

/// Rounded so that the sum over stages kept in a row is right to one slot,
/// where rounding each up would add a slot a stage.
int TimeTable::held_slots(int s, const Keep& keep) const {
  const int64_t before = held_before_[static_cast<size_t>(s)];
  const int64_t slots =
      (before + keep.held_bytes) / slot_bytes_ - before / slot_bytes_;
  return static_cast<int>(std::min<int64_t>(slots, slots_ + 1));
}

TimeTable::Candidate TimeTable::keep_candidate(int s, const Keep& keep,
                                               int t) const {
  Candidate candidate{keep.ms,
                      std::max(up(keep.forward_bytes + model_->gradient(t)),
                               up(model_->backward_bytes(s, keep, t)))};
  if (s + 1 == t) return candidate;
  candidate.rest = &row(s + 1, keep.next, t);
  candidate.rest_shift = held_slots(s, keep);
  return candidate;
}

TimeTable::Candidate TimeTable::split_candidate(int s, int c, int t,
                                                int split) const {
  const Drop& drop = model_->drop(s, split);
  const int64_t own = model_->context(s, c).own_bytes;
  return {model_->forward(s, split),
          up(own + drop.bytes + model_->gradient(t)),
          &row(split, drop.context, t),
          up(own),
          &row(s, c, split),
          t == model_->stages ? up(model_->output_bytes) : 0};
}

void TimeTable::fill(int s, int c, int t, float fastest) {
  std::fill(best_.begin(), best_.end(), kNever);
  low_ = slots_ + 1;
  high_ = -1;
  for (const Keep& keep : model_->context(s, c).keeps) {
    add(keep_candidate(s, keep, t), slots_);
  }
  // Where everything is kept the fastest way, no memory more is of use.
  int limit = slots_;
  if (high_ >= 0 && best_[static_cast<size_t>(high_)] <= fastest) {
    limit = high_;
    while (limit > low_ && best_[static_cast<size_t>(limit) - 1] <= fastest) {
      --limit;
    }
  }
  for (const int split : model_->ends_of(s)) {
    if (split >= t) break;
    add(split_candidate(s, c, t, split), limit);
  }
  finish(rows_[model_->position(s, c, t)]);
}

/// Adds a candidate at all amounts of memory up to `limit`. Above the highest
/// it writes to it is constant, which finish() sees to.
void TimeTable::add(const Candidate& candidate, int limit) {
  static const float kZero = 0;
  static const Row kNothing{&kZero, 0, 1};
  const Row& rest = candidate.rest != nullptr ? *candidate.rest : kNothing;
  const Row& front = candidate.front != nullptr ? *candidate.front : kNothing;
  if (rest.count == 0 || front.count == 0) return;
  const int rest_high = rest.high() + candidate.rest_shift;
  const int front_high = front.high() + candidate.front_shift;
  const int low = std::max({candidate.low, rest.low + candidate.rest_shift,
                            front.low + candidate.front_shift});
  if (low > limit) return;
  const float rest_least = rest.ms[rest.count - 1];
  const float front_least = front.ms[front.count - 1];
  float* best = best_.data();
  const float least = candidate.ms + rest_least + front_least;
  if (least >= best[low]) return;
  // Nothing to gain from where a time as good as its best is known already.
  const auto known =
      std::lower_bound(best + low, best + limit + 1, least,
                       [](float time, float bound) { return time > bound; });
  limit = std::min(limit, static_cast<int>(known - best));

  const int both = std::min({rest_high, front_high, limit});
  const int high = std::min(std::max({rest_high, front_high, low}), limit);
  const float ms = candidate.ms;
  const int rest_from = rest.low + candidate.rest_shift;
  const int front_from = front.low + candidate.front_shift;
  int m = low;
  for (; m <= both; ++m) {
    const float time = ms + rest.ms[m - rest_from] + front.ms[m - front_from];
    best[m] = time < best[m] ? time : best[m];
  }
  for (; m <= std::min(rest_high, high); ++m) {
    const float time = ms + rest.ms[m - rest_from] + front_least;
    best[m] = time < best[m] ? time : best[m];
  }
  for (; m <= std::min(front_high, high); ++m) {
    const float time = ms + rest_least + front.ms[m - front_from];
    best[m] = time < best[m] ? time : best[m];
  }
  if (m <= high) {
    best[m] = std::min(best[m], least);
  }
  low_ = std::min(low_, low);
  high_ = std::max(high_, high);
}

/// Keeps the part of the row in which times fall.
void TimeTable::finish(Row& row) {
  if (high_ < low_) return;
  float least = kNever;
  int last = low_;
  for (int m = low_; m <= high_; ++m) {
    float& time = best_[static_cast<size_t>(m)];
    if (time < least) {
      least = time;
      last = m;
    }
    time = least;
  }
  row.low = low_;
  row.count = last - low_ + 1;
  float* ms = allocate(row.count);
  std::copy_n(best_.begin() + low_, row.count, ms);
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

std::optional<int> TimeTable::fewest() const {
  const Row& all = row(0, 0, model_->stages);
  if (all.count == 0) return std::nullopt;
  return all.low;
}

int TimeTable::most() const {
  return row(0, 0, model_->stages).high();
}

float TimeTable::ms(int slots) const {
  return row(0, 0, model_->stages).at(slots);
}

std::vector<Op> TimeTable::ops(int slots) const {
  return Writer(*model_, *this).write(slots);
}

Choice TimeTable::choose(int s, int c, int t, int64_t slots) const {
  Choice best;
  float least = kNever;
  const auto& keeps = model_->context(s, c).keeps;
  for (size_t k = 0; k < keeps.size(); ++k) {
    const Candidate candidate = keep_candidate(s, keeps[k], t);
    const float ms = candidate.at(slots);
    if (ms >= least) continue;
    least = ms;
    best = {static_cast<int>(k), -1, slots - candidate.rest_shift, 0};
  }
  for (const int split : model_->ends_of(s)) {
    if (split >= t) break;
    const Candidate candidate = split_candidate(s, c, t, split);
    const float ms = candidate.at(slots);
    if (ms >= least) continue;
    least = ms;
    best = {-1, split, slots - candidate.rest_shift,
            slots - candidate.front_shift};
  }
  return best;
}

}  // namespace reprise::plan
