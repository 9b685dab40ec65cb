#include "distributed/parameter_shards.h"

#include "recompute/stage_parameters.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace reprise::detail {
namespace {

/// 1-D view of a dense tensor in memory order.
torch::Tensor flat_view(const torch::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

}  // namespace

ParameterShards::ParameterShards(std::shared_ptr<RankGroup> group,
                                 std::shared_ptr<const BucketLayout> layout,
                                 bool own)
    : group_(std::move(group)), layout_(std::move(layout)) {
  const torch::NoGradGuard no_grad;
  for (size_t b = 0; b < layout_->buckets().size(); ++b) {
    const auto& bucket = layout_->buckets()[b];
    const int64_t share = bucket.padded / group_->size();
    const int64_t begin = share * group_->rank();
    if (own) shares_.push_back(torch::zeros({share}, bucket.options));
    for (size_t i = bucket.first; i < bucket.first + bucket.count; ++i) {
      const auto& entry = layout_->entries()[i];
      const torch::Tensor& tensor = entry.parameter.tensor;
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(),
                  "[--shard] expected dense parameters, got '",
                  entry.parameter.name, "' with strides ", tensor.strides());
      const int64_t from = std::max(begin, entry.offset);
      const int64_t to = std::min(begin + share, entry.offset + tensor.numel());
      if (to <= from) continue;
      shards_.push_back({b, i, from - entry.offset, to - from, from - begin});
      torch::Tensor piece =
          flat_view(tensor.detach())
              .slice(0, from - entry.offset, to - entry.offset);
      if (own) {
        torch::Tensor mine = shares_[b].slice(0, from - begin, to - begin);
        mine.copy_(piece);
        piece = mine;
      }
      // As the parameter does, for optimizers.
      piece.set_requires_grad(tensor.requires_grad());
      list_.emplace_back(entry.parameter.name, piece);
    }
  }
}

void ParameterShards::set_gradients(size_t b, const torch::Tensor& sum,
                                    const std::vector<bool>& used) {
  for (size_t i = 0; i < shards_.size(); ++i) {
    const Shard& shard = shards_[i];
    if (shard.bucket != b) continue;
    torch::Tensor& gradient = list_[i].second.mutable_grad();
    gradient.reset();
    if (used[shard.entry]) {
      gradient = sum.slice(0, shard.at, shard.at + shard.size);
    }
  }
}

void ParameterShards::reserve_gather() {
  int64_t largest = 0;
  for (const auto& bucket : layout_->buckets()) {
    largest = std::max(largest, bytes_of_gather(bucket));
  }
  const auto options = torch::TensorOptions(torch::kByte)
                           .device(layout_->buckets().front().options.device());
  while (buffers_.size() < 2) {
    buffers_.push_back(torch::empty({largest}, options));
  }
}

void ParameterShards::all_gather() {
  const torch::NoGradGuard no_grad;
  reserve_gather();
  const auto& buckets = layout_->buckets();
  // The next bucket is in flight while the previous one is copied.
  std::pair<torch::Tensor, compat::Work> previous;
  for (size_t b = 0; b <= buckets.size(); ++b) {
    std::pair<torch::Tensor, compat::Work> now;
    if (b < buckets.size()) {
      now = gather(buckets[b], values_in(b, "", {}), buffers_[b % 2]);
    }
    if (b > 0) {
      group_->wait(previous.second);
      scatter(buckets[b - 1], previous.first);
    }
    previous = std::move(now);
  }
  // Threads of the backend may still refer to them.
  for (const torch::Tensor& buffer : buffers_) {
    set_storage_memory(buffer, nullptr);
  }
  buffers_.clear();
}

ParameterShards::NamedList ParameterShards::gather_full(
    const NamedList& shard_values, const std::vector<std::string>& prefixes) {
  const torch::NoGradGuard no_grad;
  const ByName by_name(shard_values.begin(), shard_values.end());
  NamedList result;
  for (const std::string& prefix : prefixes) {
    for (size_t b = 0; b < layout_->buckets().size(); ++b) {
      gather_bucket(prefix, b, by_name, result);
    }
  }
  return result;
}

ParameterShards::NamedList ParameterShards::gather_parameters() {
  const torch::NoGradGuard no_grad;
  const ByName by_name(list_.begin(), list_.end());
  NamedList result;
  for (size_t b = 0; b < layout_->buckets().size(); ++b) {
    gather_bucket("", b, by_name, result);
  }
  return result;
}

std::vector<ParameterShards::Piece> ParameterShards::pieces(
    const NamedList& shard_values, const std::string& prefix) const {
  const ByName by_name(shard_values.begin(), shard_values.end());
  std::vector<Piece> list;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const auto& parameter = layout_->entries()[shards_[i].entry].parameter;
    const std::string name = prefix + parameter.name;
    torch::Tensor values = list_[i].second;
    if (!prefix.empty()) {
      const auto found = by_name.find(name);
      if (found == by_name.end()) continue;
      values = found->second;
    }
    list.push_back(
        {name, values.detach().view({-1}), parameter.tensor, shards_[i].from});
  }
  return list;
}

void ParameterShards::load(const NamedList& full) {
  const torch::NoGradGuard no_grad;
  const ByName pieces = [&] {
    const NamedList selected = select_shards(full, {""});
    return ByName(selected.begin(), selected.end());
  }();
  for (auto& [name, piece] : list_) {
    if (const auto found = pieces.find(name); found != pieces.end()) {
      piece.copy_(found->second);
    }
  }
}

ParameterShards::NamedList ParameterShards::select_shards(
    const NamedList& full, const std::vector<std::string>& prefixes) const {
  const torch::NoGradGuard no_grad;
  const ByName by_name(full.begin(), full.end());
  NamedList result;
  for (const auto& [name, tensor] : full) {
    if (!is_parameter_state(name, prefixes)) result.emplace_back(name, tensor);
  }
  for (const std::string& prefix : prefixes) {
    for (const Shard& shard : shards_) {
      const auto& parameter = layout_->entries()[shard.entry].parameter;
      const auto found = by_name.find(prefix + parameter.name);
      if (found == by_name.end()) continue;
      torch::Tensor strided = torch::empty_strided(parameter.tensor.sizes(),
                                                   parameter.tensor.strides(),
                                                   found->second.options());
      strided.copy_(found->second);
      result.emplace_back(found->first,
                          flat_view(strided)
                              .slice(0, shard.from, shard.from + shard.size)
                              .clone());
    }
  }
  return result;
}

/// This rank's values in a bucket with their offsets. An empty `prefix` selects the
/// parameters themselves.
ParameterShards::Values ParameterShards::values_in(
    size_t b, const std::string& prefix, const ByName& by_name) const {
  Values values;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const Shard& shard = shards_[i];
    if (shard.bucket != b) continue;
    if (prefix.empty()) {
      values.emplace_back(shard.at, list_[i].second);
      continue;
    }
    const auto found = by_name.find(prefix + list_[i].first);
    if (found != by_name.end()) values.emplace_back(shard.at, found->second);
  }
  return values;
}

std::pair<torch::Tensor, compat::Work> ParameterShards::gather(
    const BucketLayout::Bucket& bucket, const Values& values) {
  const torch::Tensor buffer = torch::empty({bytes_of_gather(bucket)},
                                            bucket.options.dtype(torch::kByte));
  return gather(bucket, values, buffer);
}

int64_t ParameterShards::bytes_of_gather(
    const BucketLayout::Bucket& bucket) const {
  return bucket.bytes() + bucket.bytes() / group_->size();
}

std::pair<torch::Tensor, compat::Work> ParameterShards::gather(
    const BucketLayout::Bucket& bucket, const Values& values,
    const torch::Tensor& buffer) {
  const int64_t share = bucket.padded / group_->size();
  const torch::Tensor flat =
      buffer.narrow(0, 0, bytes_of_gather(bucket))
          .view(c10::typeMetaToScalarType(bucket.options.dtype()));
  torch::Tensor all = flat.narrow(0, 0, bucket.padded);
  torch::Tensor own = flat.narrow(0, bucket.padded, share);
  own.zero_();
  for (const auto& [at, tensor] : values) {
    own.slice(0, at, at + tensor.numel()).copy_(tensor.detach().view({-1}));
  }
  compat::Work work = group_->all_gather(all, own);
  return {all, work};
}

void ParameterShards::scatter(const BucketLayout::Bucket& bucket,
                              const torch::Tensor& all) {
  for (size_t i = bucket.first; i < bucket.first + bucket.count; ++i) {
    const auto& entry = layout_->entries()[i];
    entry.parameter.tensor.detach().copy_(BucketLayout::view_of(entry, all));
  }
}

void ParameterShards::gather_bucket(const std::string& prefix, size_t b,
                                    const ByName& by_name, NamedList& result) {
  const auto& bucket = layout_->buckets()[b];
  const auto& entries = layout_->entries();
  // Parameters for which any rank has values.
  std::vector<int64_t> has(bucket.count, 0);
  for (size_t i = 0; i < bucket.count; ++i) {
    has[i] =
        by_name.count(prefix + entries[bucket.first + i].parameter.name) > 0;
  }
  has = group_->all_reduce_max(std::move(has));
  auto [all, work] = gather(bucket, values_in(b, prefix, by_name));
  group_->wait(work);
  if (group_->rank() != 0) return;
  const torch::Tensor host = all.cpu();
  for (size_t i = 0; i < bucket.count; ++i) {
    if (has[i] == 0) continue;
    const auto& entry = entries[bucket.first + i];
    result.emplace_back(prefix + entry.parameter.name,
                        BucketLayout::view_of(entry, host).clone());
  }
}

bool ParameterShards::is_parameter_state(
    const std::string& name, const std::vector<std::string>& prefixes) const {
  for (const std::string& prefix : prefixes) {
    if (!name.starts_with(prefix)) continue;
    for (const auto& entry : layout_->entries()) {
      if (name.compare(prefix.size(), std::string::npos,
                       entry.parameter.name) == 0) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace reprise::detail
