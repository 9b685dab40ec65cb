#pragma once

#include <reprise/recompute/schedule.h>
#include <reprise/recompute/simulate.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace reprise {

struct SolverOptions {
  /// Maximum number of slots that a table divides memory into. The default, 0,
  /// chooses a number that takes about 0.1 s per table for a chain of 100
  /// stages and 3 s for one of 1,000. The result is exact if all sizes are
  /// multiples of a slot.
  int slots = 0;
};

/// Finds the fastest persistent schedule of a chain for any memory budget.
/// Implements the dynamic program of Beaumont, Eyraud-Dubois, Herrmann, Joly,
/// Shilova, "Optimal checkpointing for heterogeneous chains", 2019, with the
/// costs and the memory model of simulate(). In a persistent schedule, kept
/// activations stay until the backward that uses them. A stage is recomputed
/// only for the next backward, from the nearest kept boundary, and only if it
/// is not kept itself.
///
/// Bytes are those of Simulation::peak_bytes, the increase over the memory
/// before the forward pass. Whether a schedule fits is decided exactly and
/// checked with simulate(), so that rounding can cost time but never memory. In
/// chains of more than 128 stages (48 if memory is ample), an interval that is
/// reversed on its own spans at most 64 (32) stages, or starts or ends at one
/// of 64 (32) boundaries spread over the chain.
///
/// Tables are built when a budget in their range is first requested, and occupy
/// at most 256 MiB together. Thread-safe.
class Solver {
 public:
  /// Throws c10::Error if there are no stages or if an option is out of range.
  explicit Solver(ChainCosts chain_costs, const SolverOptions& options = {});
  ~Solver();
  Solver(Solver&&) noexcept;
  Solver& operator=(Solver&&) noexcept;

  /// Returns the smallest budget that a persistent schedule fits into.
  int64_t smallest_bytes() const;
  /// Returns the budget at which nothing is recomputed. More memory saves no
  /// time.
  int64_t largest_bytes() const;

  /// A schedule and its costs.
  struct Solution {
    Schedule schedule;
    Simulation simulation;
  };

  /// Returns the fastest schedule found whose peak is at most `bytes`, or
  /// nothing if none fits. It is never slower than a strategy of strategy.h
  /// that fits (for more than 64 stages, about sixty values of K or S are
  /// compared), nor than an earlier result of this solver for fewer bytes.
  /// Activations in host memory are prefetched (OpKind::kFetch) if `bytes`
  /// leaves room for them.
  std::optional<Solution> solve(int64_t bytes) const;

  /// Returns Pareto-optimal solutions by ascending memory and descending time.
  /// There are at most `points` of them, including both ends. Throws c10::Error
  /// if `points` is less than 2.
  std::vector<Solution> frontier(int points = 64) const;

  /// Returns the memory of the tables built so far, in bytes.
  int64_t table_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
