#pragma once

#include <reprise/recompute/chain.h>

/// Tied parameters, which several stages use, and the order in which their
/// gradients are added. Tested by tests/recompute/execution_test.cpp.
///
/// One backward call over the whole model first adds the contributions of all
/// stages and then adds their sum to `.grad`. Several calls would add each
/// contribution to `.grad`, which rounds differently if `.grad` holds the
/// gradients of an earlier micro-batch. Layers of a weight with a copy
/// (WeightCopies) add to `.grad` directly in either case.
namespace reprise {

struct TiedParameter {
  torch::Tensor parameter;
  int first_stage;  ///< first stage that uses it, and so the last in backward
};

/// Returns the parameters that more than one stage of `chain` uses.
std::vector<TiedParameter> tied_parameters(const Chain& chain);

/// Sets the gradients of `parameters` aside during its lifetime. The destructor
/// adds them to the new gradients.
class TiedGradients {
 public:
  explicit TiedGradients(const std::vector<TiedParameter>& parameters);
  ~TiedGradients();

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
