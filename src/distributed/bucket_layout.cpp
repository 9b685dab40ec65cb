#include "distributed/bucket_layout.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <tuple>

namespace reprise::detail {

namespace {

/// Alignment of parameters in bytes.
constexpr int64_t kAlign = 128;

int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

bool gathered_together(const GradientReducer::Parameter& p,
                       const GradientReducer::Parameter& q) {
  return p.unit == q.unit && p.halved == q.halved;
}

}  // namespace

BucketLayout::BucketLayout(
    const std::vector<GradientReducer::Parameter>& parameters,
    const BucketRules& rules) {
  TORCH_CHECK(rules.bucket_bytes > 0,
              "[--bucket] expected a size above 0, got ", rules.bucket_bytes);
  for (const auto& parameter : parameters) {
    if (parameter.tensor.requires_grad() != rules.frozen) {
      entries_.push_back({parameter});
    }
  }
  TORCH_CHECK(rules.frozen || !entries_.empty(),
              "[GradientReducer] expected parameters with gradients, got none");
  std::stable_sort(entries_.begin(), entries_.end(),
                   [&rules](const Entry& a, const Entry& b) {
                     const auto& [p, q] = std::tie(a.parameter, b.parameter);
                     if (p.first_stage != q.first_stage) {
                       return p.first_stage > q.first_stage;
                     }
                     return rules.by_unit && std::tie(p.unit, p.halved) <
                                                 std::tie(q.unit, q.halved);
                   });
  fill_buckets(rules);
}

void BucketLayout::fill_buckets(const BucketRules& rules) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const torch::Tensor& tensor = entries_[i].parameter.tensor;
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    const auto item = static_cast<int64_t>(tensor.element_size());
    const bool fits =
        !buckets_.empty() &&
        buckets_.back().options.dtype() == tensor.dtype() &&
        buckets_.back().options.device() == tensor.device() &&
        buckets_.back().elements * item + bytes <= rules.bucket_bytes &&
        (!rules.by_unit ||
         gathered_together(entries_[i].parameter, entries_[i - 1].parameter));
    if (!fits) {
      Bucket& bucket = buckets_.emplace_back();
      bucket.first = i;
      bucket.element_bytes = item;
      bucket.halved = rules.by_unit && entries_[i].parameter.halved;
      bucket.options = tensor.options().requires_grad(false);
    }
    Bucket& bucket = buckets_.back();
    if (rules.by_unit) {
      bucket.elements = round_up(bucket.elements, kAlign / item);
    }
    entries_[i].offset = bucket.elements;
    bucket.elements += tensor.numel();
    bucket.ready_stage = std::max(0, entries_[i].parameter.first_stage);
    ++bucket.count;
  }
  for (Bucket& bucket : buckets_) {
    bucket.padded = round_up(bucket.elements, rules.divisor);
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
