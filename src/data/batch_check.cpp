#include "data/batch_check.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace reprise::detail {

void check_batch(const Batch& batch, int64_t samples,
                 std::optional<int64_t> count) {
  TORCH_CHECK(!batch.tensors.empty(),
              "[dataset] expected a batch with tensors, got none; return what "
              "the chain of the model takes in Batch::tensors");
  for (size_t i = 0; i < batch.tensors.size(); ++i) {
    TORCH_CHECK(batch.tensors[i].defined(),
                "[dataset] expected defined tensors in a batch, but tensor ", i,
                " of ", batch.tensors.size(),
                " is undefined; return an empty tensor if it has no values");
  }
  TORCH_CHECK(batch.samples == samples, "[dataset] expected a batch of the ",
              samples, " samples asked for, got ", batch.samples,
              "; set Batch::samples to the number of indices");
  TORCH_CHECK(batch.count >= 0,
              "[dataset] expected a Batch::count of at least 0, got ",
              batch.count);
  TORCH_CHECK(
      !count || batch.count == *count, "[dataset] expected a count of ",
      count.value_or(0), ", the sum of Dataset::count() over the indices, got ",
      batch.count, "; let Batch::count and Dataset::count() count the same");
}

void check_order(const std::vector<int64_t>& order, int64_t size) {
  for (const int64_t index : order) {
    TORCH_CHECK(index >= 0 && index < size,
                "[dataset] expected indices from 0 to ", size - 1,
                " in the order of an epoch, got ", index,
                "; leave out what the dataset does not have");
  }
}

Batch largest_batch(const Dataset& data, int64_t samples) {
  Batch batch = data.largest(samples);
  check_batch(batch, samples, std::nullopt);
  return batch;
}

void BatchTypes::check(const Batch& batch) {
  if (types_.empty()) {
    for (const auto& tensor : batch.tensors) {
      types_.emplace_back(tensor.scalar_type(), tensor.device());
    }
    return;
  }
  TORCH_CHECK(
      batch.tensors.size() == types_.size(), "[dataset] expected ",
      types_.size(), " tensors in every batch, as in the first one, got ",
      batch.tensors.size(), "; return the same tensors for all samples");
  for (size_t i = 0; i < types_.size(); ++i) {
    const torch::Tensor& tensor = batch.tensors[i];
    const auto& [type, device] = types_[i];
    TORCH_CHECK(tensor.scalar_type() == type && tensor.device() == device,
                "[dataset] expected tensor ", i, " to be ", type, " on ",
                device, " in every batch, as in the first one, got ",
                tensor.scalar_type(), " on ", tensor.device(),
                "; convert it in get()");
  }
}

}  // namespace reprise::detail
