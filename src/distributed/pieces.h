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

/// With a divided optimizer: this rank's share of every bucket, as pieces of parameters.
class Pieces {
 public:
  using NamedList = GradientReducer::NamedList;

  /// `layout` outlives it.
  Pieces(std::shared_ptr<RankGroup> group, const BucketLayout& layout);

  /// Views of the parameters, a name a parameter.
  const NamedList& list() const { return list_; }

  /// Parts of `sum`, this rank's of bucket `b`, become the pieces' gradients; none where
  /// the entry is not `used` by any rank.
  void give_gradients(size_t b, const torch::Tensor& sum,
                      const std::vector<bool>& used);

  /// Brings all parameters up to date on all ranks.
  void share();

  /// As GradientReducer's.
  NamedList whole(const NamedList& of_pieces,
                  const std::vector<std::string>& kinds);
  NamedList parts(const NamedList& whole,
                  const std::vector<std::string>& kinds) const;

 private:
  struct Piece {
    size_t bucket = 0;
    size_t entry = 0;
    int64_t from = 0;  // in the parameter
    int64_t size = 0;
    int64_t at = 0;  // in this rank's part of the bucket
  };
  using ByName = std::map<std::string, torch::Tensor>;
  using Values = std::vector<std::pair<int64_t, torch::Tensor>>;

  Values values_in(size_t b, const std::string& kind,
                   const ByName& by_name) const;
  std::pair<torch::Tensor, compat::Work> gather(
      const BucketLayout::Bucket& bucket, const Values& values);
  void scatter(const BucketLayout::Bucket& bucket, const torch::Tensor& all);
  void whole_of(const std::string& kind, size_t b, const ByName& by_name,
                NamedList& result);
  bool is_parameters(const std::string& name,
                     const std::vector<std::string>& kinds) const;

  std::shared_ptr<RankGroup> group_;
  const BucketLayout& layout_;
  std::vector<Piece> pieces_;  // as list_
  NamedList list_;
};

}  // namespace reprise::detail
