#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

namespace reprise {

struct WeightCopiesOptions {
  /// Hold no copies: operators convert a weight each time they need it, two or three times
  /// per micro-batch, and free the result immediately. Takes no memory between uses.
  bool convert_per_use = false;
  /// Hold bfloat16 copies inside the weights: from its first use by an operator to expire(),
  /// and from refresh() on in later windows, the memory of a weight has its bfloat16 values
  /// and what is missing to float32. Nothing else may read the weight then; an operator that
  /// needs it in full precision merges a copy for itself. A weight that no operator uses, or
  /// one in full precision first, stays as it is. expire() restores every bit.
  /// Takes no memory, and two passes over the weights per window. Applies to matrices with
  /// rows of a multiple of 8 values that are not shared; all others have copies as usual.
  /// Values exactly between two bfloat16 values are rounded away from zero instead of to the
  /// even one.
  bool split = false;
  /// Also hold weights that are in half precision themselves, which need no copy. Their
  /// gradients are added in float32.
  bool half_weights = false;
  /// Weights that operators without copies use as well, such as a tied embedding. The
  /// gradients of all other weights may be computed concurrently with the backward.
  std::vector<torch::Tensor> shared_weights{};
  /// Weights without a copy whose gradients ops::embedding() adds directly.
  std::vector<torch::Tensor> embedding_tables{};
};

/// Half-precision copies of weights, made once for many micro-batches.
///
/// Autocast converts the weights in every forward and every recomputation, and returns
/// their gradients in half precision; two more passes convert and accumulate these. While a
/// WeightCopies exists, ops::linear() uses the copy of each weight that it holds, and the
/// backward adds the gradient to `weight.grad()` within the matrix product, in the type of
/// the weight:
///
///     WeightCopies copies(weights, torch::kBFloat16);
///     for (auto& window : windows) {
///       copies.refresh();
///       for (auto& micro_batch : window) loss_of(micro_batch).backward();
///       copies.expire();
///       update();
///     }
///
/// A copy that is older than its weight is not used: ops::linear() then does the same as
/// autocast. In float32 there is nothing to copy: the weight itself is used, and the
/// gradient is added directly all the same.
///
/// Takes 2 bytes per element in half precision unless convert_per_use or split is set, and
/// nothing in float32. At most one WeightCopies may hold a weight at a time. refresh() and expire()
/// must be called from one thread at a time; operators may run on any thread.
class WeightCopies {
 public:
  /// Copies the weights. `type`: float16, bfloat16 or float32. May include biases. Ignores
  /// weights of other types than float32, weights that do not require a gradient, and
  /// duplicates. Throws c10::Error if another WeightCopies holds one of the weights.
  WeightCopies(const std::vector<torch::Tensor>& weights,
               torch::ScalarType type, const WeightCopiesOptions& options = {});
  ~WeightCopies();
  WeightCopies(const WeightCopies&) = delete;
  WeightCopies& operator=(const WeightCopies&) = delete;

  /// Copies the current values of the weights into the same memory, unless an update has
  /// already written them.
  void refresh();

  /// Marks the copies as outdated. Must be called before the weights change, and with
  /// WeightCopiesOptions::split before anything but an operator reads them.
  void expire();

  /// As expire(), but leaves weights with copies inside as they are, for an update that
  /// changes them in place or calls restore().
  void expire_for_update();

  /// Restores the values of all weights that have their copies inside, and lets those copies
  /// expire.
  void restore() { restore(split_); }
  /// The same for those of `weights` that have their copies inside.
  static void restore(const std::vector<torch::Tensor>& weights);

  /// Whether `weight` has its copy inside at present, so that its values cannot be read.
  static bool is_split(const torch::Tensor& weight);

  /// The memory of the copies; empty in float32.
  const std::vector<torch::Tensor>& copies() const { return copies_; }

  /// The weights that it holds, including embedding_tables, in the order given. Operators
  /// add to their gradients directly while the copies are up to date.
  const std::vector<torch::Tensor>& weights() const { return weights_; }

  // For operators, which see only a weight: they find its copy by a registry of all
  // WeightCopies of the process. Code that has the WeightCopies uses weights() instead.

  /// The copy of `weight` in `type` if it is up to date, or a new one with
  /// convert_per_use; otherwise undefined. `padded`: with the zeros that follow it. A matrix
  /// is padded to a multiple of 128 rows, a vector to a multiple of 8 elements.
  static torch::Tensor find(const torch::Tensor& weight, torch::ScalarType type,
                            bool padded = false);

  /// Whether a WeightCopies that is up to date holds `weight`: its operators then add to
  /// its gradient directly, instead of autograd at the end. An execution of a chain asks
  /// this for tied weights, because it runs operators of which it knows only the weights.
  static bool has(const torch::Tensor& weight);

  /// Whether a WeightCopies that is up to date holds `weight` with convert_per_use, in
  /// `type`.
  static bool converts_per_use(const torch::Tensor& weight,
                               torch::ScalarType type);

  /// Whether `weight` is held and not one of shared_weights.
  static bool has_single_use(const torch::Tensor& weight);

  /// The copy of `weight`, up to date or not, for an update to write; undefined if there is
  /// none, or if it is inside the weight.
  static torch::Tensor memory_of(const torch::Tensor& weight);

  /// Marks the copies of `weights` as outdated, and leaves all others as they are: only these
  /// weights are about to change, in the middle of a backward that does not use them any more.
  static void mark_outdated(const std::vector<torch::Tensor>& weights);

  /// Marks the copies of `weights` as up to date: an update has written them.
  static void mark_current(const std::vector<torch::Tensor>& weights);

  /// (1, count) ones in the type of the copies, if `weight` is held and on CUDA; a matrix
  /// product with them adds up rows. Undefined otherwise, and for counts above 65,536.
  static torch::Tensor ones(const torch::Tensor& weight, int64_t count);

 private:
  std::vector<torch::Tensor> weights_;
  std::vector<torch::Tensor> copies_;   // one tensor for all, with padding
  std::vector<torch::Tensor> views_;    // of each copy, without padding
  std::vector<torch::Tensor> sources_;  // the weight of each view
  std::vector<torch::Tensor>
      split_;  // weights that can hold their copies themselves
};

}  // namespace reprise
