#include "support.h"

#include <reprise/data/loader.h>

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

namespace {

using namespace reprise::testing;
using reprise::Batch;
using reprise::Loader;
using reprise::LoaderOptions;
using reprise::with_order;

/// Sample i has the value and the count i.
class OrderedNumbers : public reprise::Dataset {
 public:
  int64_t size() const override { return 10; }
  int64_t count(int64_t index) const override { return index; }
  Batch get(const std::vector<int64_t>& indices) const override {
    Batch batch{.tensors = {torch::tensor(indices)},
                .samples = static_cast<int64_t>(indices.size())};
    for (const int64_t index : indices) batch.count += index;
    return batch;
  }
  std::string description() const override { return "numbers"; }
};

/// 13 indices with replacement.
std::vector<int64_t> drawn(int64_t epoch, uint64_t seed) {
  std::mt19937_64 random(seed * 1000 + static_cast<uint64_t>(epoch));
  std::vector<int64_t> order(13);
  for (int64_t& index : order) index = static_cast<int64_t>(random() % 10);
  return order;
}

std::vector<int64_t> values_of(const Batch& batch) {
  const auto* data = batch.tensors[0].data_ptr<int64_t>();
  return {data, data + batch.tensors[0].numel()};
}

TEST(Order, LoadersFollowIt) {
  const auto data = with_order(std::make_shared<OrderedNumbers>(), drawn);
  EXPECT_EQ(data->epoch_size(), 13);
  EXPECT_EQ(data->size(), 10);
  for (const int workers : {0, 1, 3}) {
    for (const int64_t batch : {1, 4, 50}) {
      Loader loader(data, {.batch = batch, .seed = 5, .workers = workers});
      for (int64_t epoch = 0; epoch < 5; ++epoch) {
        std::vector<int64_t> found;
        int64_t count = 0;
        EXPECT_EQ(loader.count_ahead(100),
                  torch::tensor(drawn(epoch, 5)).sum().item<int64_t>());
        while (const auto some = loader.next()) {
          const auto values = values_of(*some);
          found.insert(found.end(), values.begin(), values.end());
          count += some->count;
        }
        EXPECT_EQ(found, drawn(epoch, 5)) << workers << " " << batch;
      }
    }
  }
  // Evaluation reads every sample.
  Loader all(data, {.batch = 10, .shuffle = false});
  EXPECT_EQ(values_of(*all.next()),
            (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST(Order, PositionsAndShardsAreOfTheOrder) {
  const auto data = with_order(std::make_shared<OrderedNumbers>(), drawn);
  const auto order = drawn(2, 1);
  Loader loader(data, {.batch = 4}, {.epoch = 2, .sample = 3});
  EXPECT_EQ(values_of(*loader.next()),
            std::vector<int64_t>(order.begin() + 3, order.begin() + 7));
  std::vector<int64_t> found;
  for (int shard = 0; shard < 3; ++shard) {
    Loader part(data,
                {.batch = 9, .window = 13, .shard = shard, .num_shards = 3},
                {.epoch = 2});
    const auto window = part.window_ahead();
    EXPECT_EQ(window.total_count, torch::tensor(order).sum().item<int64_t>());
    const auto values = values_of(*part.next());
    found.insert(found.end(), values.begin(), values.end());
  }
  EXPECT_EQ(found, order);
}

/// An order may use what the training thread uses, such as random generators.
TEST(Order, IsCalledByTheCallersThreadOnly) {
  const auto here = std::this_thread::get_id();
  std::atomic<int> calls = 0;
  const auto data = with_order(std::make_shared<OrderedNumbers>(),
                               [&](int64_t epoch, uint64_t seed) {
                                 EXPECT_EQ(std::this_thread::get_id(), here);
                                 ++calls;
                                 return drawn(epoch, seed);
                               });
  Loader loader(data, {.batch = 13, .workers = 3});
  for (int i = 0; i < 20; ++i) loader.next();
  EXPECT_GT(calls, 10);
}

TEST(Order, ErrorsSayWhatToDo) {
  const auto data = std::make_shared<OrderedNumbers>();
  const auto expect = [&](const reprise::EpochOrder& order,
                          const std::string& part) {
    const auto text = error_of([&] {
      Loader loader(with_order(data, order), {.batch = 5, .workers = 0});
      for (int i = 0; i < 9; ++i) loader.next();
    });
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect([](int64_t, uint64_t) { return std::vector<int64_t>(); },
         "expected an order with indices, got an empty one");
  expect([](int64_t, uint64_t) { return std::vector<int64_t>{10}; },
         "from 0 to 9 in the order of an epoch, got 10");
  expect([n = int64_t{0}](
             int64_t, uint64_t) mutable { return std::vector<int64_t>{n++}; },
         "two different ones; seed its generator with both");
  expect([](int64_t epoch,
            uint64_t) { return std::vector<int64_t>(epoch < 2 ? 5 : 4); },
         "expected an order of 5 indices for every epoch, got 4 for epoch 2");
  EXPECT_NE(error_of([&] { with_order(data, nullptr); }).find("got null"),
            std::string::npos);
}

}  // namespace
