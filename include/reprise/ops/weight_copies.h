#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

namespace reprise {

/// How WeightCopies treats them.
struct WeightCopiesOptions {
  /// No copies: lean_linear() converts a weight each time it needs it, and lets go of
  /// that at once. Costs nothing but the conversions, two or three a micro-batch.
  bool each_use = false;
  /// Those of the weights that other operators have too, such as an embedding; the
  /// gradients of all others may be added to beside the backward.
  std::vector<torch::Tensor> used_elsewhere{};
  /// Weights without a copy whose gradients are added straight: of lean_embedding().
  std::vector<torch::Tensor> straight{};
};

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
/// Costs 2 bytes a value in half precision (unless each use makes its own), nothing in
/// single. One at a time may have a weight; its members are for one thread,
/// lean_linear() for any.
class WeightCopies {
 public:
  /// Copies at once. `type`: half precision, or single. Weights of other types than
  /// single precision, those without a gradient and equal ones are left out. Biases
  /// are welcome as well. Throws c10::Error where another one has a weight already.
  WeightCopies(const std::vector<torch::Tensor>& weights,
               torch::ScalarType type, const WeightCopiesOptions& options = {});
  ~WeightCopies();
  WeightCopies(const WeightCopies&) = delete;
  WeightCopies& operator=(const WeightCopies&) = delete;

  /// Copies the weights as they are now, into the same memory.
  void refresh();

  /// The weights are about to change.
  void expire();

  /// The memory of the copies; none in single precision.
  const std::vector<torch::Tensor>& copies() const { return copies_; }

  /// The copy of `weight` in `type`, if there is one that is no older than it, or a
  /// new one where each use makes its own; undefined otherwise. With `padded` the rows of zeros that follow it too:
  /// a two-dimensional copy has as many as make its rows a multiple of 128, a
  /// vector those that make its values one of 8.
  static torch::Tensor find(const torch::Tensor& weight, torch::ScalarType type,
                            bool padded = false);

  /// Whether one that is no older than `weight` knows it: its gradient is then added
  /// to by each of its layers, not by autograd at the end of all.
  static bool has(const torch::Tensor& weight);

  /// Whether one that is no older than `weight` has each use of it make a copy of its
  /// own, in `type`.
  static bool each_use(const torch::Tensor& weight, torch::ScalarType type);

  /// Whether nothing but its layer adds to the gradient of `weight`.
  static bool alone(const torch::Tensor& weight);

  /// Where `weight` has a copy, on CUDA: a row of `count` ones in its type, to add
  /// rows up by a product; undefined elsewhere, and for more than 65,536.
  static torch::Tensor ones(const torch::Tensor& weight, int64_t count);

 private:
  std::vector<torch::Tensor> weights_;
  std::vector<torch::Tensor> copies_;   // all in one, with their rows of zeros
  std::vector<torch::Tensor> views_;    // each, without
  std::vector<torch::Tensor> sources_;  // what each is a copy of
};

}  // namespace reprise
