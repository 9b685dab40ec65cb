#pragma once

/// Datasets and samplers of LibTorch's torch::data. Not part of reprise/train.h, because
/// those headers take long to compile. Include <torch/torch.h> for the datasets, samplers
/// and transforms themselves.

#include <reprise/data/dataset.h>

#include <torch/data/datasets/base.h>
#include <torch/data/example.h>
#include <torch/data/samplers/base.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace reprise {

/// How from_torch() uses a dataset whose get_batch() returns `TorchBatch`.
template <class TorchBatch>
struct TorchDataOptions {
  std::string name = "torch::data";  ///< for logs
  /// Makes a batch. Null: the tensors data and target of torch::data::Example, or the
  /// tensor; lists of them are stacked. `samples` and `count` are set afterwards if
  /// they are 0. Called by several threads at once.
  std::function<Batch(TorchBatch)> collate{};
  /// See Dataset::count(). Null: 1.
  std::function<int64_t(int64_t index)> count{};
};

namespace detail {

/// Calls `order` with the CPU's default generator seeded by `epoch` and `seed`, and
/// restores the generator.
std::vector<int64_t> with_seeded_generator(
    int64_t epoch, uint64_t seed,
    const std::function<std::vector<int64_t>()>& order);

using TorchPair = torch::data::Example<torch::Tensor, torch::Tensor>;
using TorchData =
    torch::data::Example<torch::Tensor, torch::data::example::NoTarget>;

/// What can be made a batch without a function of the user.
template <class T>
concept TorchExample = std::same_as<T, torch::Tensor> ||
    std::same_as<T, TorchPair> || std::same_as<T, TorchData>;

inline std::vector<torch::Tensor> tensors_of(const torch::Tensor& tensor) {
  return {tensor};
}
inline std::vector<torch::Tensor> tensors_of(const TorchPair& example) {
  return {example.data, example.target};
}
inline std::vector<torch::Tensor> tensors_of(const TorchData& example) {
  return {example.data};
}
template <TorchExample T>
std::vector<torch::Tensor> tensors_of(const std::vector<T>& examples) {
  std::vector<std::vector<torch::Tensor>> lists;
  for (const T& example : examples) {
    const auto tensors = tensors_of(example);
    lists.resize(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) lists[i].push_back(tensors[i]);
  }
  std::vector<torch::Tensor> stacked;
  for (const auto& list : lists) stacked.push_back(torch::stack(list));
  return stacked;
}

template <class Data>
class TorchDataset final : public Dataset {
 public:
  using Options = TorchDataOptions<typename Data::BatchType>;
  static constexpr bool kCollates =
      requires(const typename Data::BatchType& batch) {
    tensors_of(batch);
  };

  TorchDataset(Data data, Options options)
      : data_(std::move(data)), options_(std::move(options)) {
    TORCH_CHECK(kCollates || options_.collate,
                "[from_torch] expected a function that makes a Batch of what '",
                options_.name,
                "' returns; set TorchDataOptions::collate, or map() the "
                "dataset with torch::data::transforms::Stack");
    const auto size = data_.size();
    TORCH_CHECK(size.has_value(),
                "[from_torch] expected a dataset with a "
                "size, '",
                options_.name, "' has none; derive from StreamDataset instead");
    size_ = static_cast<int64_t>(*size);
  }

  int64_t size() const override { return size_; }
  int64_t count(int64_t index) const override {
    return options_.count ? options_.count(index) : 1;
  }
  Batch get(const std::vector<int64_t>& indices) const override {
    std::vector<size_t> request;
    int64_t counted = 0;
    for (const int64_t index : indices) {
      TORCH_CHECK_INDEX(index >= 0 && index < size_,
                        "[dataset] expected a sample below ", size_, ", got ",
                        index);
      request.push_back(static_cast<size_t>(index));
      counted += count(index);
    }
    Batch batch = collate(read(request));
    if (batch.samples == 0) {
      batch.samples = static_cast<int64_t>(indices.size());
    }
    if (batch.count == 0) batch.count = counted;
    return batch;
  }
  std::string description() const override {
    return options_.name + ", " + std::to_string(size_) + " samples";
  }

 private:
  /// get_batch() is not const. As in torch::data's own loader, each thread uses a copy.
  typename Data::BatchType read(const std::vector<size_t>& request) const {
    std::unique_ptr<Data> data;
    {
      const std::lock_guard lock(mutex_);
      if (free_.empty()) {
        data = std::make_unique<Data>(data_);
      } else {
        data = std::move(free_.back());
        free_.pop_back();
      }
    }
    auto batch = data->get_batch(request);
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(data));
    return batch;
  }

  Batch collate(typename Data::BatchType batch) const {
    if (options_.collate) return options_.collate(std::move(batch));
    if constexpr (kCollates) {
      return {.tensors = tensors_of(batch)};
    } else {
      return {};
    }
  }

  const Data data_;  // only copied
  const Options options_;
  int64_t size_ = 0;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Data>>
      free_;  // copies that are not in use
};

}  // namespace detail

/// Makes a dataset of a map-style dataset of torch::data, with its transforms:
///
///     auto images = torch::data::datasets::MNIST(path).map(
///         torch::data::transforms::Normalize<>(0.13, 0.31));
///     inputs.data.train = from_torch(images, {.name = "mnist"});
///
/// The dataset is copied for every thread that reads; one that is large should share
/// its samples among copies, as tensors do. Throws c10::Error if it has no size, or if
/// its batches need a TorchDataOptions::collate that is not set.
template <class Data>
std::shared_ptr<const Dataset> from_torch(
    Data dataset, TorchDataOptions<typename Data::BatchType> options = {}) {
  static_assert(!Data::is_stateful,
                "a stateful dataset has no indices: derive from "
                "reprise::StreamDataset instead");
  return std::make_shared<detail::TorchDataset<Data>>(std::move(dataset),
                                                      std::move(options));
}

/// Makes the order of an epoch of a sampler of torch::data, of its own size:
///
///     with_order(data, order_from(torch::data::samplers::RandomSampler(n)))
///
/// Random numbers of the default generator depend on the epoch and the seed, and do not
/// change those of the training. A sampler with set_epoch() gets the epoch. One with
/// random numbers of its own must have that function, because an order must be the same
/// whenever it is asked for. Ranks divide each window among themselves: give a
/// DistributedSampler one replica.
template <class Sampler>
EpochOrder order_from(Sampler sampler) {
  const auto shared = std::make_shared<Sampler>(std::move(sampler));
  return [shared](int64_t epoch, uint64_t seed) {
    return detail::with_seeded_generator(epoch, seed, [&] {
      if constexpr (requires { shared->set_epoch(size_t{}); }) {
        shared->set_epoch(static_cast<size_t>(epoch));
      }
      shared->reset({});
      std::vector<int64_t> order;
      while (const auto some = shared->next(1024)) {
        order.insert(order.end(), some->begin(), some->end());
      }
      return order;
    });
  };
}

}  // namespace reprise
