#include "distributed/bucket_layout.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace reprise::detail {

BucketLayout::BucketLayout(
    const std::vector<GradientReducer::Parameter>& parameters,
    int64_t bucket_bytes, int divisor) {
  TORCH_CHECK(bucket_bytes > 0, "[--bucket] expected a size above 0, got ",
              bucket_bytes);
  for (const auto& parameter : parameters) {
    if (parameter.tensor.requires_grad()) entries_.push_back({parameter});
  }
  TORCH_CHECK(!entries_.empty(),
              "[GradientReducer] expected parameters with gradients, got none");
  std::stable_sort(entries_.begin(), entries_.end(),
                   [](const Entry& a, const Entry& b) {
                     return a.parameter.first_stage > b.parameter.first_stage;
                   });
  fill_buckets(bucket_bytes, divisor);
}

void BucketLayout::fill_buckets(int64_t bucket_bytes, int divisor) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const torch::Tensor& tensor = entries_[i].parameter.tensor;
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    const bool fits =
        !buckets_.empty() &&
        buckets_.back().options.dtype() == tensor.dtype() &&
        buckets_.back().options.device() == tensor.device() &&
        buckets_.back().elements * buckets_.back().element_bytes + bytes <=
            bucket_bytes;
    if (!fits) {
      Bucket& bucket = buckets_.emplace_back();
      bucket.first = i;
      bucket.element_bytes = static_cast<int64_t>(tensor.element_size());
      bucket.options = tensor.options().requires_grad(false);
    }
    Bucket& bucket = buckets_.back();
    entries_[i].offset = bucket.elements;
    bucket.elements += tensor.numel();
    bucket.ready_stage = std::max(0, entries_[i].parameter.first_stage);
    ++bucket.count;
  }
  for (Bucket& bucket : buckets_) {
    bucket.padded = (bucket.elements + divisor - 1) / divisor * divisor;
    const int stage = bucket.ready_stage;
    if (stage > 0 && (cuts_.empty() || cuts_.back() != stage)) {
      cuts_.push_back(stage);
    }
  }
}

torch::Tensor BucketLayout::view_of(const Entry& entry,
                                    const torch::Tensor& flat) {
  const torch::Tensor& tensor = entry.parameter.tensor;
  if (tensor.is_non_overlapping_and_dense()) {
    return flat.as_strided(tensor.sizes(), tensor.strides(),
                           flat.storage_offset() + entry.offset);
  }
  return flat.slice(0, entry.offset, entry.offset + tensor.numel())
      .view(tensor.sizes());
}

}  // namespace reprise::detail
