#pragma once

#include "recompute/tied_gradients.h"

#include <reprise/recompute/chain.h>

#include <cstdint>
#include <functional>
#include <vector>

/// What an execution needs to continue a backward in which an allocation has failed. Tested by
/// tests/recompute/continue_backward_test.cpp.
namespace reprise::detail {

/// The point from which a failed backward can be continued.
struct FailedBackward {
  int stages_left;
  Tensors gradients;  ///< of the outputs of these stages
};

/// The backward of an autograd graph that has not ended, so that it can be repeated.
class GraphBackward {
 public:
  using Brings = std::function<bool(const torch::Tensor&)>;

  /// `uses` are those of all parameters; the graph is that of the stages from `first_stage` to
  /// `last_stage`. `brings` is ExecutionOptions::brings_gradient.
  GraphBackward(int first_stage, int last_stage, Tensors output_gradients,
                const std::vector<ParameterUse>& uses, const Brings& brings);

  /// Returns whether nothing was added to gradients that had a value before: those to which
  /// later stages have added, and those of weights with copies, which are not set aside.
  /// All others can be dropped.
  bool can_be_repeated() const;

  /// Returns whether stages of the graph use the parameter.
  bool uses(const ParameterUse& use) const;

  /// Returns the gradients of the outputs.
  Tensors take_gradients();

 private:
  struct Partial {
    torch::Tensor parameter, gradient;
    int64_t version;
  };
  int first_stage_, last_stage_;
  Tensors gradients_;
  std::vector<Partial> partial_;
};

/// Whether the gradient of a parameter stays where it is during a backward: operators with
/// copies of weights add to it, and it cannot be brought in again.
bool stays_in_place(const torch::Tensor& parameter,
                    const GraphBackward::Brings& brings);

/// Drops what a failed backward has added to gradients of parameters that no stage from
/// `reported` on uses. `running`: the backward of the graph that failed; null if none did.
void drop_gradients(const std::vector<ParameterUse>& uses, int reported,
                    const GraphBackward* running,
                    const GraphBackward::Brings& brings);

/// The first `count` stages.
Chain first_stages(const Chain& chain, int count);

}  // namespace reprise::detail
