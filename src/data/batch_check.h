#pragma once

#include <reprise/data/dataset.h>

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

/// Checks of what a dataset returns. Errors are c10::Error and say what to change.
namespace reprise::detail {

/// Checks that `batch` has defined tensors, `samples` samples and the count `count`;
/// nullopt: any that is not negative.
void check_batch(const Batch& batch, int64_t samples,
                 std::optional<int64_t> count);

/// Checks that all indices of `order` are below `size`.
void check_order(const std::vector<int64_t>& order, int64_t size);

/// Returns `data.largest(samples)`, checked.
Batch largest_batch(const Dataset& data, int64_t samples);

/// The number, types and devices of the tensors of a training's batches.
class BatchTypes {
 public:
  /// The first batch decides; throws if a later one differs.
  void check(const Batch& batch);

 private:
  std::vector<std::pair<torch::ScalarType, torch::Device>> types_;
};

}  // namespace reprise::detail
