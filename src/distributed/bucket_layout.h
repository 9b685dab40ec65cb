#pragma once

#include "distributed/reducer.h"

#include <torch/types.h>

#include <cstdint>
#include <vector>

namespace reprise::detail {

struct BucketRules {
  int64_t bucket_bytes = int64_t{25}
                         << 20;  ///< maximum, unless one value is larger
  /// The size of each bucket is a multiple of it.
  int divisor = 1;
  /// Each bucket has parameters of one unit only, at addresses that kernels can use, and
  /// those that may be gathered in half precision apart from others.
  bool by_unit = false;
  /// Lays out the parameters without gradients instead of those with.
  bool frozen = false;
};

/// Assigns each parameter an offset in a flat bucket. The layout is equal on all
/// ranks. Tested by tests/distributed/reducer_test.cpp.
class BucketLayout {
 public:
  struct Entry {
    GradientReducer::Parameter parameter;
    int64_t offset = 0;  ///< in elements, from the start of its bucket
  };

  struct Bucket {
    size_t first = 0, count = 0;  ///< range of entries
    int64_t elements = 0;
    int64_t padded = 0;  ///< elements, rounded up to a multiple of the divisor
    int64_t element_bytes = 0;
    int ready_stage = 0;  ///< stage whose backward completes the bucket
    bool halved = false;  ///< see GradientReducer::Parameter; with `by_unit`
    torch::TensorOptions options{};

    int64_t bytes() const { return padded * element_bytes; }
  };

  /// Lays out the parameters that require gradients, last stage first.
  BucketLayout(const std::vector<GradientReducer::Parameter>& parameters,
               const BucketRules& rules);

  const std::vector<Entry>& entries() const { return entries_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  /// Stages whose backward completes a bucket.
  const std::vector<int>& cuts() const { return cuts_; }

  /// View of the values of `entry` in a flat bucket, with the shape and strides of
  /// the parameter.
  static torch::Tensor view_of(const Entry& entry, const torch::Tensor& flat);

 private:
  void fill_buckets(const BucketRules& rules);

  std::vector<Entry> entries_;  // in the order of their buckets
  std::vector<Bucket> buckets_;
  std::vector<int> cuts_;
};

}  // namespace reprise::detail
