#pragma once

#include <reprise/recompute/chain.h>

/// Parameters that several stages use, and the order in which their gradients
/// add up.
///
/// One autograd call over the whole model adds the contributions of all stages
/// to each other first and their sum to `.grad` last. A backward in several
/// calls would add each of them to `.grad`, which in floating point is another
/// number as soon as `.grad` holds an earlier micro-batch. Where a weight has a
/// copy (WeightCopies), its layers add to `.grad` as they come in one call too.
namespace reprise {

struct TiedParameter {
  torch::Tensor parameter;
  int first_stage;  ///< that has it: where a backward ends with it
};

/// Parameters of `chain` that more than one of its stages has.
std::vector<TiedParameter> tied_parameters(const Chain& chain);

/// While it lives, the gradients of `parameters` start from nothing; at the end
/// what they held before is added.
class TiedGradients {
 public:
  explicit TiedGradients(const std::vector<TiedParameter>& parameters);
  ~TiedGradients();

  /// The backward has reached `stage`: what belongs to it and to later ones alone is
  /// added now.
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
