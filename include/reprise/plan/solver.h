#pragma once

#include <reprise/recompute/schedule.h>
#include <reprise/recompute/simulate.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace reprise {

struct SolverOptions {
  /// How finely memory is divided; 0: as finely as the time allows. Sizes that
  /// are whole multiples of a slot are exact.
  int slots = 0;
};

/// The fastest persistent schedule of a chain for every memory budget at once:
/// the dynamic program of Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova,
/// "Optimal checkpointing for heterogeneous chains", 2019, on the figures and
/// the memory model of simulate(). Persistent: what is kept stays until the
/// backward that uses it.
///
/// Bytes here are those of Simulation::peak_bytes: the rise over the memory
/// before the forward.
class Solver {
 public:
  explicit Solver(ChainFigures figures, const SolverOptions& options = {});
  ~Solver();
  Solver(Solver&&) noexcept;
  Solver& operator=(Solver&&) noexcept;

  /// The least that any schedule needs.
  int64_t smallest_bytes() const;
  /// With this much nothing is recomputed.
  int64_t largest_bytes() const;

  struct Solution {
    Schedule schedule;
    Simulation simulation;
  };

  /// The fastest that stays within `bytes`, never slower than any strategy of
  /// strategy.h that does; nothing where none fits.
  std::optional<Solution> solve(int64_t bytes) const;

  /// Solutions of rising memory and falling time, none better than another in
  /// both; at most `points` of them, the two ends included.
  std::vector<Solution> frontier(int points = 64) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
