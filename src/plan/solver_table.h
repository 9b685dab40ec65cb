#pragma once

#include "solver_model.h"

#include <reprise/recompute/schedule.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace reprise::plan {

/// How to reverse an interval from s to t: keep the graph of stage s, or run
/// without graphs up to a boundary that is kept, and return to s later.
struct Choice {
  int keep = -1;      ///< position in Context::keeps, or
  int split = -1;     ///< the boundary
  int64_t rest = 0;   ///< memory left for what is behind s or the split
  int64_t front = 0;  ///< memory for s up to the split
};

/// The least memory for every interval, to the byte.
class LeastMemory {
 public:
  explicit LeastMemory(const ChainModel& model);
  int64_t bytes() const;
  std::vector<Op> ops() const;

  Choice choose(int s, int c, int t, int64_t) const;

 private:
  int64_t& at(int s, int c, int t);
  int64_t at(int s, int c, int t) const;
  int64_t keep_bytes(int s, const Keep& keep, int t) const;
  int64_t split_bytes(int s, int c, int t, int split) const;

  const ChainModel* model_;
  std::vector<int64_t> bytes_;
};

/// The least time for every interval and every amount of memory up to `slots`
/// slots of `slot_bytes`.
class TimeTable {
 public:
  TimeTable(const ChainModel& model, int64_t slot_bytes, int slots);

  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t reach_bytes() const { return slot_bytes_ * slots_; }
  /// The fewest slots that are enough for the chain; nothing where none are.
  std::optional<int> fewest() const;
  /// More slots than these buy no time.
  int most() const;
  /// Of the whole chain.
  float ms(int slots) const;
  std::vector<Op> ops(int slots) const;
  int64_t table_bytes() const;

  Choice choose(int s, int c, int t, int64_t slots) const;

 private:
  /// Times for `low` slots and more; the last holds for all above. They never
  /// rise.
  struct Row {
    const float* ms = nullptr;
    int low = 0;
    int count = 0;  // 0: no memory is enough
    int high() const { return low + count - 1; }
    float at(int64_t slots) const;
  };
  /// One candidate for a row: `ms` + rest[m - rest_shift] +
  /// front[m - front_shift], from `low` on.
  struct Candidate {
    float ms;
    int low;
    const Row* rest = nullptr;
    int rest_shift = 0;
    const Row* front = nullptr;
    int front_shift = 0;
    float at(int64_t slots) const;
  };

  const Row& row(int s, int c, int t) const;
  int up(int64_t bytes) const;
  int held_slots(int s, const Keep& keep) const;
  Candidate keep_candidate(int s, const Keep& keep, int t) const;
  Candidate split_candidate(int s, int c, int t, int split) const;
  void fill(int s, int c, int t, float fastest);
  void add(const Candidate& candidate, int limit);
  void finish(Row& row);
  float* allocate(int count);

  const ChainModel* model_;
  int64_t slot_bytes_;
  int slots_;
  std::vector<int64_t> held_before_;  // by stage, if all are kept as they are
  std::vector<Row> rows_;
  std::vector<std::unique_ptr<float[]>> blocks_;
  int block_left_ = 0;
  int64_t allocated_ = 0;
  // Of the row being made.
  std::vector<float> best_;
  int low_ = 0, high_ = 0;
};

}  // namespace reprise::plan
