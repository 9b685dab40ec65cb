#pragma once

#include "compat/process_group.h"
#include "distributed/bucket_layout.h"

#include <reprise/distributed/group.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace reprise::detail {

/// This rank's share of every bucket: views of the parameters if those are whole on each rank,
/// or memory of its own. Tested by tests/distributed/reducer_test.cpp.
class ParameterShards {
 public:
  using NamedList = GradientReducer::NamedList;

  /// If `own`, copies the values instead of viewing them.
  ParameterShards(std::shared_ptr<RankGroup> group,
                  std::shared_ptr<const BucketLayout> layout, bool own = false);

  const std::shared_ptr<const BucketLayout>& layout() const { return layout_; }

  /// The pieces of parameters, as flat tensors with the parameters' names.
  const NamedList& list() const { return list_; }

  /// With `own`: this rank's share of bucket `b`.
  const torch::Tensor& share(size_t b) const { return shares_.at(b); }

  /// Sets the shards' gradients from `sum`, this rank's share of bucket `b`. A
  /// shard whose entry is not `used` by any rank gets no gradient.
  void set_gradients(size_t b, const torch::Tensor& sum,
                     const std::vector<bool>& used);

  /// Without `own`: copies the shards of all ranks into the parameters. All memory is allocated
  /// by reserve_gather(), so that nothing fails between two collectives.
  void reserve_gather();
  void all_gather();

  /// A piece of a tensor like a parameter.
  struct Piece {
    std::string name;  ///< prefix + parameter name
    torch::Tensor values;
    torch::Tensor parameter;  ///< its shape and strides
    int64_t from = 0;         ///< first value, in the order of memory
  };
  /// This rank's pieces of parameters, or with a prefix those in `shard_values`.
  std::vector<Piece> pieces(const NamedList& shard_values,
                            const std::string& prefix) const;

  /// Collective. Gathers the parameters themselves; see GradientReducer::gather_full().
  NamedList gather_parameters();
  /// Copies this rank's pieces out of whole parameters.
  void load(const NamedList& full);

  /// See GradientReducer.
  NamedList gather_full(const NamedList& shard_values,
                        const std::vector<std::string>& prefixes);
  NamedList select_shards(const NamedList& full,
                          const std::vector<std::string>& prefixes) const;

 private:
  struct Shard {
    size_t bucket = 0;
    size_t entry = 0;
    int64_t from = 0;  // offset in the parameter
    int64_t size = 0;
    int64_t at = 0;  // offset in this rank's share of the bucket
  };
  using ByName = std::map<std::string, torch::Tensor>;
  using Values = std::vector<std::pair<int64_t, torch::Tensor>>;

  Values values_in(size_t b, const std::string& prefix,
                   const ByName& by_name) const;
  std::pair<torch::Tensor, compat::Work> gather(
      const BucketLayout::Bucket& bucket, const Values& values);
  /// The same in the memory of a buffer.
  std::pair<torch::Tensor, compat::Work> gather(
      const BucketLayout::Bucket& bucket, const Values& values,
      const torch::Tensor& buffer);
  int64_t bytes_of_gather(const BucketLayout::Bucket& bucket) const;
  void scatter(const BucketLayout::Bucket& bucket, const torch::Tensor& all);
  void gather_bucket(const std::string& prefix, size_t b, const ByName& by_name,
                     NamedList& result);
  bool is_parameter_state(const std::string& name,
                          const std::vector<std::string>& prefixes) const;

  std::shared_ptr<RankGroup> group_;
  std::shared_ptr<const BucketLayout> layout_;
  std::vector<Shard> shards_;  // in the order of list_
  NamedList list_;
  std::vector<torch::Tensor> buffers_;  // of all_gather(), in bytes
  std::vector<torch::Tensor> shares_;   // with memory of its own, by bucket
};

}  // namespace reprise::detail
