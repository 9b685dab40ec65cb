#pragma once

#include <reprise/distributed/reducer.h>

#include <torch/types.h>

#include <cstdint>
#include <vector>

namespace reprise::detail {

/// Which values lie where in which flat bucket: the same on every rank.
class BucketLayout {
 public:
  struct Entry {
    GradientReducer::Parameter parameter;
    int64_t offset = 0;  ///< in its bucket, elements
  };

  struct Bucket {
    size_t first = 0, count = 0;  ///< entries
    int64_t elements = 0;
    int64_t padded = 0;  ///< so that ranks can share it
    int64_t element_bytes = 0;
    int ready_stage = 0;  ///< whose backward is the last to add to it
    torch::TensorOptions options{};

    int64_t bytes() const { return padded * element_bytes; }
  };

  /// Of the parameters that have gradients, those of the last stages first. With
  /// `shares` above 1 buckets can be divided by it.
  BucketLayout(const std::vector<GradientReducer::Parameter>& parameters,
               int64_t bucket_bytes, int shares);

  const std::vector<Entry>& entries() const { return entries_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  /// Stages at which a bucket becomes ready.
  const std::vector<int>& cuts() const { return cuts_; }

  /// Of a flat bucket the values of `entry`, in its shape and order in memory.
  static torch::Tensor view_of(const Entry& entry, const torch::Tensor& flat);

 private:
  void fill_buckets(int64_t bucket_bytes, int shares);

  std::vector<Entry> entries_;  // in the order of their buckets
  std::vector<Bucket> buckets_;
  std::vector<int> cuts_;
};

}  // namespace reprise::detail
