#pragma once

#include <reprise/recompute/schedule.h>
#include <reprise/recompute/simulate.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace reprise {

struct SolverOptions {
  /// Most parts that a table divides memory into; 0: as many as take about 0.1 s
  /// per table for a chain of 100 stages and 3 s for one of 1,000. If all sizes
  /// are multiples of a part, the result is exact.
  int slots = 0;
};

/// The fastest persistent schedule of a chain for every memory budget at once:
/// the dynamic program of Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova,
/// "Optimal checkpointing for heterogeneous chains", 2019, on the figures and
/// the memory model of simulate(). Persistent: what is kept stays until the
/// backward that uses it, and a stage runs again only for the backward that comes
/// next, from the nearest boundary that is kept, and not while its graph is.
///
/// Bytes here are those of Simulation::peak_bytes: the rise over the memory
/// before the forward. What fits is decided to the byte, and simulate() has the
/// last word, so that rounding can cost time but never memory. In chains of more
/// than 128 stages (48 if memory is ample) a part that is reversed by itself
/// spans at most 64 (32) stages, or starts or ends at one of 64 (32) places spread
/// over the chain.
///
/// Tables are made when a budget of their range is first asked for, and take at
/// most 256 MiB together.
///
/// May be shared by threads.
class Solver {
 public:
  /// Throws c10::Error where there are no stages.
  explicit Solver(ChainCosts figures, const SolverOptions& options = {});
  ~Solver();
  Solver(Solver&&) noexcept;
  Solver& operator=(Solver&&) noexcept;

  /// The least that a persistent schedule needs.
  int64_t smallest_bytes() const;
  /// More than this buys no time: nothing is recomputed.
  int64_t largest_bytes() const;

  struct Solution {
    Schedule schedule;
    Simulation simulation;
  };

  /// The fastest schedule found that stays within `bytes`; nothing if none fits.
  /// Never slower than a strategy of strategy.h that fits; for more than 64 stages,
  /// about sixty values of each number are compared. Never slower than an earlier
  /// answer of this solver for fewer bytes. What stages have in the host's memory
  /// is fetched ahead (OpKind::kFetch) if `bytes` leave room.
  std::optional<Solution> solve(int64_t bytes) const;

  /// Solutions of rising memory and falling time, none better than another in
  /// both; at most `points` of them, the two ends included.
  std::vector<Solution> frontier(int points = 64) const;

  /// What the solver's tables take at present.
  int64_t table_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
