#pragma once

#include <reprise/recompute/chain.h>

#include <vector>

/// Parameters by the stages that use them, and the order in which gradients of tied parameters,
/// which several stages use, are added. Tested by tests/recompute/execution_test.cpp.
///
/// One backward call over the whole model first adds the contributions of all
/// stages and then adds their sum to `.grad`. Several calls would add each
/// contribution to `.grad`, which rounds differently if `.grad` holds the
/// gradients of an earlier micro-batch. Layers of a weight with a copy
/// (WeightCopies) add to `.grad` directly in either case.
namespace reprise {

struct ParameterUse {
  torch::Tensor parameter;
  std::vector<int>
      stages;  ///< ascending; the first one is the last in backward

  int first_stage() const { return stages.front(); }
  int last_stage() const { return stages.back(); }
};

/// Returns all parameters of `chain`.
std::vector<ParameterUse> parameter_uses(const Chain& chain);

/// Returns the parameters that more than one stage of `chain` uses.
std::vector<ParameterUse> tied_parameters(const Chain& chain);

/// Sets the gradients of `parameters` aside. Those that are not added by finish() are lost.
class TiedGradients {
 public:
  explicit TiedGradients(const std::vector<ParameterUse>& parameters);

  /// Adds the gradients of parameters that no stage before `stage` uses. Call
  /// after the backward of `stage`.
  void finish(int stage);

  TiedGradients(const TiedGradients&) = delete;
  TiedGradients& operator=(const TiedGradients&) = delete;

 private:
  struct Aside {
    torch::Tensor parameter;
    torch::Tensor gradient;
    int first_stage;
  };
  std::vector<Aside> aside_;
};

}  // namespace reprise
