#include "distributed/pieces.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace reprise::detail {
namespace {

/// Values in the order in which they lie, for tensors without gaps.
torch::Tensor as_they_lie(const torch::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

}  // namespace

Pieces::Pieces(std::shared_ptr<RankGroup> group, const BucketLayout& layout)
    : group_(std::move(group)), layout_(layout) {
  const torch::NoGradGuard no_grad;
  for (size_t b = 0; b < layout.buckets().size(); ++b) {
    const auto& bucket = layout.buckets()[b];
    const int64_t part = bucket.padded / group_->size();
    const int64_t begin = part * group_->rank();
    for (size_t i = bucket.first; i < bucket.first + bucket.count; ++i) {
      const auto& entry = layout.entries()[i];
      const torch::Tensor& tensor = entry.parameter.tensor;
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(),
                  "[--shard] expected parameters that lie in one piece, got '",
                  entry.parameter.name, "' with strides ", tensor.strides());
      const int64_t from = std::max(begin, entry.offset);
      const int64_t to = std::min(begin + part, entry.offset + tensor.numel());
      if (to <= from) continue;
      pieces_.push_back({b, i, from - entry.offset, to - from, from - begin});
      list_.emplace_back(entry.parameter.name,
                         as_they_lie(tensor.detach())
                             .slice(0, from - entry.offset, to - entry.offset));
    }
  }
}

void Pieces::give_gradients(size_t b, const torch::Tensor& sum,
                            const std::vector<bool>& used) {
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    if (piece.bucket != b) continue;
    torch::Tensor& gradient = list_[i].second.mutable_grad();
    gradient.reset();
    if (used[piece.entry]) {
      gradient = sum.slice(0, piece.at, piece.at + piece.size);
    }
  }
}

void Pieces::share() {
  const torch::NoGradGuard no_grad;
  const auto& buckets = layout_.buckets();
  // One on its way while the one before is put in place.
  std::pair<torch::Tensor, compat::Work> before;
  for (size_t b = 0; b <= buckets.size(); ++b) {
    std::pair<torch::Tensor, compat::Work> now;
    if (b < buckets.size()) now = gather(buckets[b], values_in(b, "", {}));
    if (b > 0) {
      group_->wait(before.second);
      scatter(buckets[b - 1], before.first);
    }
    before = std::move(now);
  }
}

Pieces::NamedList Pieces::whole(const NamedList& of_pieces,
                                const std::vector<std::string>& kinds) {
  const torch::NoGradGuard no_grad;
  const ByName by_name(of_pieces.begin(), of_pieces.end());
  NamedList result;
  for (const std::string& kind : kinds) {
    for (size_t b = 0; b < layout_.buckets().size(); ++b) {
      whole_of(kind, b, by_name, result);
    }
  }
  return result;
}

Pieces::NamedList Pieces::parts(const NamedList& whole,
                                const std::vector<std::string>& kinds) const {
  const torch::NoGradGuard no_grad;
  const ByName by_name(whole.begin(), whole.end());
  NamedList result;
  for (const auto& [name, tensor] : whole) {
    if (!is_parameters(name, kinds)) result.emplace_back(name, tensor);
  }
  for (const std::string& kind : kinds) {
    for (const Piece& piece : pieces_) {
      const auto& parameter = layout_.entries()[piece.entry].parameter;
      const auto found = by_name.find(kind + parameter.name);
      if (found == by_name.end()) continue;
      torch::Tensor laid = torch::empty_strided(parameter.tensor.sizes(),
                                                parameter.tensor.strides(),
                                                found->second.options());
      laid.copy_(found->second);
      result.emplace_back(found->first,
                          as_they_lie(laid)
                              .slice(0, piece.from, piece.from + piece.size)
                              .clone());
    }
  }
  return result;
}

/// This rank's values in a bucket with their places; empty `kind`: parameters.
Pieces::Values Pieces::values_in(size_t b, const std::string& kind,
                                 const ByName& by_name) const {
  Values values;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    if (piece.bucket != b) continue;
    if (kind.empty()) {
      values.emplace_back(piece.at, list_[i].second);
      continue;
    }
    const auto found = by_name.find(kind + list_[i].first);
    if (found != by_name.end()) values.emplace_back(piece.at, found->second);
  }
  return values;
}

std::pair<torch::Tensor, compat::Work> Pieces::gather(
    const BucketLayout::Bucket& bucket, const Values& values) {
  const int64_t part = bucket.padded / group_->size();
  torch::Tensor own = torch::zeros({part}, bucket.options);
  for (const auto& [at, tensor] : values) {
    own.slice(0, at, at + tensor.numel()).copy_(tensor.detach().view({-1}));
  }
  torch::Tensor all = torch::empty({bucket.padded}, bucket.options);
  compat::Work work = group_->all_gather(all, own);
  return {all, work};
}

void Pieces::scatter(const BucketLayout::Bucket& bucket,
                     const torch::Tensor& all) {
  for (size_t i = bucket.first; i < bucket.first + bucket.count; ++i) {
    const auto& entry = layout_.entries()[i];
    entry.parameter.tensor.detach().copy_(BucketLayout::view_of(entry, all));
  }
}

void Pieces::whole_of(const std::string& kind, size_t b, const ByName& by_name,
                      NamedList& result) {
  const auto& bucket = layout_.buckets()[b];
  const auto& entries = layout_.entries();
  // Which parameters any rank has values of.
  std::vector<int64_t> has(bucket.count, 0);
  for (size_t i = 0; i < bucket.count; ++i) {
    has[i] = by_name.count(kind + entries[bucket.first + i].parameter.name) > 0;
  }
  has = group_->all_reduce_max(std::move(has));
  auto [all, work] = gather(bucket, values_in(b, kind, by_name));
  group_->wait(work);
  if (group_->rank() != 0) return;
  const torch::Tensor host = all.cpu();
  for (size_t i = 0; i < bucket.count; ++i) {
    if (has[i] == 0) continue;
    const auto& entry = entries[bucket.first + i];
    result.emplace_back(kind + entry.parameter.name,
                        BucketLayout::view_of(entry, host).clone());
  }
}

bool Pieces::is_parameters(const std::string& name,
                           const std::vector<std::string>& kinds) const {
  for (const std::string& kind : kinds) {
    if (!name.starts_with(kind)) continue;
    for (const auto& entry : layout_.entries()) {
      if (name.compare(kind.size(), std::string::npos, entry.parameter.name) ==
          0) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace reprise::detail
