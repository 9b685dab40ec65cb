#pragma once

#include <reprise/recompute/chain.h>
#include <reprise/recompute/strategy.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reprise {

/// A model to verify. Both functions are called after the default generators
/// were seeded and must depend on nothing else. The chain's last stage returns
/// the sum of the losses and the count they are of, or the sum alone.
struct VerifySubject {
  std::string name;
  std::function<Chain()> make_chain;
  std::function<Tensors()> make_inputs;
  /// The chain to compare with, run stage by stage without an executor; the
  /// same as `make_chain` unless given.
  std::function<Chain()> make_reference{};
  /// What the losses are a sum of, where the chain does not say.
  int64_t count = 1;
};

struct VerifyOptions {
  int updates = 3;
  uint64_t seed = 1;
  /// Largest |a - b| over the largest |a| of a tensor that counts as the same.
  /// 0: every bit must be equal.
  double tolerance = 0;
};

/// One kind of result, over all its tensors and updates.
struct VerifyRow {
  std::string what;  ///< loss, gradients, buffers, rng, parameters
  int64_t tensors = 0;
  int64_t different = 0;    ///< tensors of which a bit differs
  double max_relative = 0;  ///< as for VerifyOptions::tolerance
  std::string worst;        ///< the tensor that has it
  bool same = true;         ///< within the tolerance
};

struct VerifyReport {
  std::string subject;
  std::string strategy;
  std::vector<VerifyRow> rows;
  std::vector<int> runs;  ///< measured, by stage, an update
  std::vector<int> simulated_runs;
  int64_t kept_peak_bytes = 0;  ///< measured
  int64_t simulated_kept_bytes = 0;
  bool same = true;  ///< all rows, and runs equal to the simulator's
};

/// Trains `subject` for some updates with `strategy` and without, from the same
/// seed, and compares everything that training leaves behind.
VerifyReport verify(const VerifySubject& subject, const Strategy& strategy,
                    const VerifyOptions& options = {});

}  // namespace reprise
