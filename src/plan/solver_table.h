#pragma once

#include "plan/solver_least.h"
#include "plan/solver_model.h"

#include <reprise/recompute/schedule.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace reprise::detail {

/// What a table may take.
struct TableLimits {
  int slots = 0;           ///< at most as many in a row; 0: any number
  double additions = 2e8;  ///< about, which take half a nanosecond each
  int64_t bytes = 200 << 20;
  int64_t unit_bytes = 1;  ///< divides all sizes: smaller slots are of no use
};

/// The least time for every interval and every amount of memory that can be left
/// for it within `reach_bytes` for the whole chain. The first amount of an
/// interval is its own least memory, to the byte; then come whole numbers of
/// slots, up to what keeps all its stages. So what happens with little memory is
/// exact, and slots are spent only on memory that makes a difference. Slots are
/// counted from where they begin if all stages before the interval are kept: a
/// row of kept stages is rounded once, not at each stage. Elsewhere sizes are
/// rounded to the nearest slot, so that errors do not add up.
class TimeTable {
 public:
  TimeTable(const ChainModel& model, const MemoryBounds& bounds,
            int64_t reach_bytes, const TableLimits& limits);

  int64_t reach_bytes() const { return reach_bytes_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t table_bytes() const;

  /// Which time an amount of memory between two slots has.
  enum class Between { kLower, kInterpolated };
  /// A schedule for `bytes`, which are at least the least memory of the chain and
  /// at most the reach. The memory left is followed to the byte, and the table
  /// only tells the times to choose by; so what is rounded never takes memory,
  /// and errors of the table matter only where two choices are about as fast.
  std::vector<Op> ops(int64_t bytes, Between between) const;

 private:
  /// Times, a slot apart; the last holds for all above. They never rise.
  struct Row {
    const float* ms = nullptr;
    int count = 0;       // 0: cannot occur
    int64_t least = 0;   // memory
    int64_t enough = 0;  // to keep all its stages
    int64_t before = 0;  // held by all stages before it, if they are kept
    int64_t first = 0;   // slot that the least memory is in
  };
  /// A part's times as they are added to those of an interval.
  struct Part {
    const float* ms;
    int count;    // from here on to the row's end; constant above
    float least;  // the last one
  };
  int64_t choose_slots(const TableLimits& limits) const;
  int64_t range(int position) const;
  int64_t slot_of(const Row& row, int64_t bytes) const;
  void prepare_rows();
  Part part(int position, const Row& whole, int k, int64_t held) const;
  void fill(int s, int c, int t);
  void add(const Way& way, const Row& row, int count);
  void add_from(const Way& way, const Row& row, int k, int end);
  void finish(Row& row, int count);
  float* allocate(int count);
  float at(int position, int64_t bytes, Between between) const;

  const ChainModel* model_;
  const MemoryBounds* bounds_;
  int64_t reach_bytes_;
  int64_t slot_bytes_;
  std::vector<Row> rows_;  // by position
  std::vector<std::unique_ptr<float[]>> blocks_;
  int block_left_ = 0;
  int64_t allocated_ = 0;
  std::vector<float> best_;  // of the row being made
};

}  // namespace reprise::detail
