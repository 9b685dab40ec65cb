#pragma once

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <vector>

namespace reprise::detail {

/// Sums of gradients over the micro-batches of a window in bfloat16, rounded stochastically,
/// which take half of the memory of exact ones. The backward of a micro-batch leaves the
/// gradients of a few stages in `.grad` at a time: they are added to the sums and freed, and in
/// the last micro-batch the sums are added to them, in float32, right before the update.
///
///     sums.begin(seed, last);
///     forward and backward; sums.final_from(stage) as soon as gradients are final
///
/// Tested by tests/accumulate/half_gradients_test.cpp.
class HalfGradients {
 public:
  using ByStage = std::vector<std::vector<torch::Tensor>>;

  /// `parameters`: by the first stage that uses them, whose backward makes their gradients
  /// final.
  explicit HalfGradients(ByStage parameters);

  /// Begins a micro-batch. `seed` determines the rounding; each micro-batch of a training
  /// needs another one.
  void begin(uint64_t seed, bool last);

  /// Gradients of parameters of `stage` and those after it are final. If an allocation fails
  /// in the last micro-batch, it may be called again and goes on.
  void final_from(int stage);

  /// Frees the sums.
  void forget() { sums_.clear(); }

  /// Returns the sum of a parameter's gradients, or an undefined tensor. For saved states.
  torch::Tensor sum(const torch::Tensor& parameter) const;
  void set_sum(const torch::Tensor& parameter, torch::Tensor sum);

 private:
  void add(const torch::Tensor& parameter, uint64_t seed);
  void restore(const torch::Tensor& parameter);

  ByStage parameters_;
  std::map<const void*, torch::Tensor> sums_;  // by TensorImpl
  size_t stages_left_ = 0;
  size_t next_ = 0;  // parameter of the stage before
  uint64_t seed_ = 0;
  bool last_ = false;
};

}  // namespace reprise::detail
