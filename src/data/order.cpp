// Tested by tests/data/dataset_test.cpp.
#include "base/splitmix.h"
#include "compat/rng.h"
#include "data/batch_check.h"

#include <reprise/data/dataset.h>
#include <reprise/data/stream.h>
#include <reprise/data/torch_data.h>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

namespace reprise {
namespace {

class OrderedDataset final : public Dataset {
 public:
  OrderedDataset(std::shared_ptr<const Dataset> dataset, EpochOrder order)
      : dataset_(std::move(dataset)), order_(std::move(order)) {
    const std::vector<int64_t> first = order_(0, 0);
    TORCH_CHECK(!first.empty(),
                "[with_order] expected an order with indices, got an empty "
                "one");
    detail::check_order(first, dataset_->size());
    TORCH_CHECK(first == order_(0, 0),
                "[with_order] expected the same order for the same epoch and "
                "seed, got two different ones; seed its generator with both");
    epoch_size_ = static_cast<int64_t>(first.size());
  }

  int64_t size() const override { return dataset_->size(); }
  Batch get(const std::vector<int64_t>& indices) const override {
    return dataset_->get(indices);
  }
  int64_t count(int64_t index) const override { return dataset_->count(index); }
  Batch largest(int64_t samples) const override {
    return dataset_->largest(samples);
  }
  std::optional<std::vector<int64_t>> order(int64_t epoch,
                                            uint64_t seed) const override {
    return order_(epoch, seed);
  }
  int64_t epoch_size() const override { return epoch_size_; }
  double mean() const override { return dataset_->mean(); }
  double stddev() const override { return dataset_->stddev(); }
  std::vector<torch::Tensor> tensors() const override {
    return dataset_->tensors();
  }
  std::string fingerprint() const override { return dataset_->fingerprint(); }
  std::string description() const override {
    return dataset_->description() + ", in an own order of " +
           std::to_string(epoch_size_) + " samples";
  }

 private:
  std::shared_ptr<const Dataset> dataset_;
  EpochOrder order_;
  int64_t epoch_size_ = 0;
};

}  // namespace

Batch Dataset::largest(int64_t samples) const {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < samples; ++i) indices.push_back(i % size());
  return get(indices);
}

std::shared_ptr<const Dataset> with_order(
    std::shared_ptr<const Dataset> dataset, EpochOrder order) {
  TORCH_CHECK(dataset != nullptr && order != nullptr,
              "[with_order] expected a dataset and an order, got null");
  TORCH_CHECK(
      dynamic_cast<const StreamDataset*>(dataset.get()) == nullptr,
      "[with_order] a stream decides its own order; reorder in its read()");
  return std::make_shared<OrderedDataset>(std::move(dataset), std::move(order));
}

std::vector<int64_t> detail::with_seeded_generator(
    int64_t epoch, uint64_t seed,
    const std::function<std::vector<int64_t>()>& order) {
  const auto before = compat::RngState::capture({});
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(splitmix(seed, static_cast<uint64_t>(epoch)));
  }
  try {
    std::vector<int64_t> indices = order();
    before.restore();
    return indices;
  } catch (...) {
    before.restore();
    throw;
  }
}

}  // namespace reprise
