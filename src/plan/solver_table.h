#pragma once

#include "plan/solver_bounds.h"
#include "plan/solver_model.h"

#include <reprise/recompute/schedule.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace reprise::detail {

/// Limits of the size of a table and of the time to fill it.
struct TableLimits {
  int slots = 0;           ///< maximum per row; 0 for no limit
  double additions = 2e8;  ///< approximate; about 0.5 ns each
  int64_t bytes = 200 << 20;
  int64_t unit_bytes = 1;  ///< common divisor of all sizes; minimum slot
};

/// The minimum time of every interval for every amount of memory that it can
/// have if the whole chain has `reach_bytes`. The first amount of an interval
/// is its exact minimum memory. The others are whole numbers of slots, up to
/// the memory in which all its stages are kept. Results for little memory are
/// therefore exact, and no slots are spent on memory that makes no difference.
/// The slots of an interval are aligned to the memory held if all stages before
/// it are kept, so that a sequence of kept stages is rounded once and not at
/// each stage. Other sizes are rounded to the nearest slot, so that errors do
/// not add up. Tested by tests/plan/solver_test.cpp.
class TimeTable {
 public:
  /// Fills the table. `model` and `bounds` must outlive it.
  TimeTable(const ChainModel& model, const MemoryBounds& bounds,
            int64_t reach_bytes, const TableLimits& limits);

  int64_t reach_bytes() const { return reach_bytes_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t table_bytes() const;

  /// How to look up an amount of memory between two slots.
  enum class Between { kLower, kInterpolated };
  /// Returns a schedule for `bytes`, which must be between the minimum memory
  /// of the chain and reach_bytes(). The remaining memory is tracked exactly,
  /// and the table provides only the times to compare. Rounding therefore never
  /// exceeds the budget, and its errors matter only if two choices are about
  /// equally fast.
  std::vector<Op> ops(int64_t bytes, Between between) const;

 private:
  /// Times of one interval, one per slot, in descending order. The last one
  /// also applies to all larger amounts of memory.
  struct Row {
    const float* ms = nullptr;
    int count = 0;               // 0 if the interval cannot occur
    int64_t min_bytes = 0;       // minimum memory
    int64_t keep_all_bytes = 0;  // memory to keep all its stages
    int64_t before_bytes = 0;    // held by the stages before it if all are kept
    int64_t first_slot = 0;      // slot of min_bytes
  };
  /// The times of a smaller interval, aligned to the slots of a larger one.
  struct Part {
    const float* ms;
    int count;     // up to the end of the row; constant above
    float min_ms;  // the last one
  };
  int64_t choose_slot_bytes(const TableLimits& limits) const;
  int64_t range(int position) const;
  int64_t slot_of(const Row& row, int64_t bytes) const;
  void prepare_rows();
  Part part(int position, const Row& whole, int k, int64_t held) const;
  void fill(int s, int c, int t);
  void add(const Reversal& reversal, const Row& row, int count);
  void add_from(const Reversal& reversal, const Row& row, int k, int end);
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
  std::vector<float> best_;  // of the row being filled
};

}  // namespace reprise::detail
