#pragma once

#include <reprise/base/enum_text.h>
#include <reprise/recompute/chain.h>
#include <reprise/recompute/strategy.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace reprise {

/// A model to verify. The functions are called after the default random
/// generators have been seeded, and must depend on nothing else. The chain's
/// last stage returns the sum of the losses, optionally followed by their
/// count.
struct VerifySubject {
  std::string name;
  std::function<Chain()> make_chain;
  std::function<Tensors()> make_inputs;
  /// The reference model, which is run stage by stage without an Execution.
  /// Defaults to `make_chain`.
  std::function<Chain()> make_reference{};
  /// Number of losses in the sum, if the chain does not return it.
  int64_t count = 1;
};

struct VerifyOptions {
  int updates = 3;    ///< number of optimizer updates
  uint64_t seed = 1;  ///< seed of the default random generators
  /// Maximum of max|a - b| / max|a| for tensors that are considered equal. If
  /// 0, they must be bit-identical.
  double tolerance = 0;
};

/// What verify() compares.
enum class VerifiedKind { kLoss, kGradients, kBuffers, kRng, kParameters };

template <>
struct EnumText<VerifiedKind> {
  static constexpr std::array<std::string_view, 5> names{
      "loss", "gradients", "buffers", "rng", "parameters"};
};

/// Comparison of one kind of result over all tensors and updates.
struct VerifyRow {
  VerifiedKind what = VerifiedKind::kLoss;
  int64_t tensors = 0;      ///< number of tensors compared
  int64_t different = 0;    ///< number of tensors that are not bit-identical
  double max_relative = 0;  ///< maximum of max|a - b| / max|a|
  std::string worst;        ///< name of the tensor with max_relative
  bool same = true;         ///< whether all are within the tolerance
};

/// Result of verify().
struct VerifyReport {
  std::string subject;
  std::string strategy;
  std::vector<VerifyRow> rows;
  std::vector<int> runs;  ///< measured forward runs per stage and update
  std::vector<int> simulated_runs;   ///< the same as predicted by simulate()
  int64_t kept_peak_bytes = 0;       ///< measured by a KeptMeter
  int64_t simulated_kept_bytes = 0;  ///< the same as predicted by simulate()
  /// Whether all rows are the same and runs equal simulated_runs.
  bool same = true;
};

/// Trains `subject` from the same seed with `strategy` and without
/// recomputation, and compares losses, gradients, buffers, random generators
/// and parameters. On CUDA, cuDNN is restricted to deterministic algorithms
/// during the call. Throws c10::Error if `options.updates` is less than 1 or if
/// check_chain() finds the chain unsuitable.
VerifyReport verify(const VerifySubject& subject, const Strategy& strategy,
                    const VerifyOptions& options = {});

/// Overload for a chain that exists, on `inputs` of a training step. It is
/// trained in place; parameters, buffers, gradients and random generators are
/// restored afterwards, also if an error is thrown. The losses are divided by
/// the first dimension of the first input.
VerifyReport verify(const Chain& chain, const Tensors& inputs,
                    const Strategy& strategy,
                    const VerifyOptions& options = {});
/// Overload for a schedule, such as that of a Plan, whose variants it runs.
VerifyReport verify(const Chain& chain, const Tensors& inputs,
                    const Schedule& schedule,
                    const VerifyOptions& options = {});
/// Overload for a selection of all strategies; see sample_strategies(). Returns
/// one report each.
std::vector<VerifyReport> verify(const Chain& chain, const Tensors& inputs,
                                 const VerifyOptions& options = {});

}  // namespace reprise
