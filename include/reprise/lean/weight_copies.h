#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

namespace reprise {

/// Copies of weights in half precision, made once for many micro-batches.
///
/// Autocast makes them anew in every forward and every recomputation, and gives the
/// gradient of a weight in half precision, which two more passes over it widen and
/// add. While a WeightCopies lives, lean_linear() of a weight that it has takes the
/// copy, and its backward adds the product straight to the weight's gradient, in the
/// weight's own precision:
///
///     WeightCopies copies(weights, torch::kBFloat16);
///     for (auto& window : windows) {
///       copies.refresh();
///       for (auto& micro : window) ...;  // forward, backward
///       copies.expire();
///       update();
///     }
///
/// A copy that is older than its weight is not taken: lean_linear() then does what
/// autocast does. In single precision there is nothing to copy, and the weight itself
/// stands for its copy; the gradient is added straight all the same.
///
/// Costs 2 bytes a value in half precision, nothing in single. One at a time may have
/// a weight; its members are for one thread, lean_linear() for any.
class WeightCopies {
 public:
  /// Copies at once. `type`: half precision, or single. Weights of other types than
  /// single precision, those without a gradient and equal ones are left out. Throws
  /// c10::Error where another one has a weight already.
  WeightCopies(const std::vector<torch::Tensor>& weights,
               torch::ScalarType type);
  ~WeightCopies();
  WeightCopies(const WeightCopies&) = delete;
  WeightCopies& operator=(const WeightCopies&) = delete;

  /// Copies the weights as they are now, into the same memory.
  void refresh();

  /// The weights are about to change.
  void expire();

  /// The memory of the copies; none in single precision.
  const std::vector<torch::Tensor>& copies() const { return copies_; }

  /// The copy of `weight` in `type`, if there is one that is no older than it;
  /// undefined otherwise. With `padded` the rows of zeros that follow it too:
  /// a two-dimensional copy has as many as make its rows a multiple of 128.
  static torch::Tensor find(const torch::Tensor& weight, torch::ScalarType type,
                            bool padded = false);

  /// Where `weight` has a copy, on CUDA: a row of `count` ones in its type, to add
  /// rows up by a product; undefined elsewhere, and for more than 65,536.
  static torch::Tensor ones(const torch::Tensor& weight, int64_t count);

 private:
  std::vector<torch::Tensor> weights_;
  std::vector<torch::Tensor> copies_;  // all in one, with their rows of zeros
  std::vector<torch::Tensor> views_;   // each, without
};

}  // namespace reprise
