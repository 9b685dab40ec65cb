#pragma once

#include <reprise/recompute/schedule.h>
#include <reprise/recompute/simulate.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace reprise {

struct SolverOptions {
  /// Into how many parts memory is divided; 0: as many as leave a chain of 100
  /// stages well under 0.2 s and one of 1,000 under 10 s. Where all sizes are
  /// multiples of a part, the result is exact. Otherwise small budgets have
  /// divisions of their own, as fine.
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
/// before the forward. simulate() has the last word on every schedule, so that
/// rounding can cost time but never memory. In chains of more than 128 stages a
/// part that is reversed by itself ends within 32 stages or at one of 32 places
/// spread over the chain.
///
/// May be shared by threads.
class Solver {
 public:
  /// Throws c10::Error where there are no stages.
  explicit Solver(ChainFigures figures, const SolverOptions& options = {});
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

  /// The fastest found that stays within `bytes`; nothing where none fits. Never
  /// slower than a strategy of strategy.h that does; for more than 64 stages
  /// about forty values of each number are compared. Where sizes are rounded, a
  /// little more memory can give a slightly slower answer. What stages have in the
  /// host's memory is fetched ahead (OpKind::kFetch) where `bytes` leave room.
  std::optional<Solution> solve(int64_t bytes) const;

  /// Solutions of rising memory and falling time, none better than another in
  /// both; at most `points` of them, the two ends included.
  std::vector<Solution> frontier(int points = 64) const;

  /// What the solver itself takes.
  int64_t table_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
