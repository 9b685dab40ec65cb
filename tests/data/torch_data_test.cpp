#include "support.h"

#include <reprise/data/loader.h>
#include <reprise/data/torch_data.h>

#include <gtest/gtest.h>
#include <torch/data/datasets/map.h>
#include <torch/data/datasets/tensor.h>
#include <torch/data/samplers/distributed.h>
#include <torch/data/samplers/random.h>
#include <torch/data/samplers/sequential.h>
#include <torch/data/transforms/stack.h>
#include <torch/data/transforms/tensor.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace {

using namespace reprise::testing;
using reprise::Batch;
using reprise::from_torch;
using reprise::Loader;
using reprise::order_from;
using reprise::with_order;
namespace td = torch::data;

/// c10::optional or std::optional, by the version of LibTorch.
using Size =
    decltype(std::declval<const td::datasets::TensorDataset&>().size());

/// Sample i is (i, i + 1) with the target 10 i.
class Pairs : public td::datasets::Dataset<Pairs> {
 public:
  td::Example<> get(size_t index) override {
    ++used;  // not thread-safe: each thread has a copy
    const auto i = static_cast<float>(index);
    return {torch::tensor({i, i + 1}),
            torch::tensor(10 * static_cast<int64_t>(index))};
  }
  Size size() const override { return 8; }
  int64_t used = 0;
};

struct Words {
  std::string text;
};

class Texts : public td::datasets::Dataset<Texts, Words> {
 public:
  Words get(size_t index) override { return {std::string(index + 1, 'a')}; }
  Size size() const override { return 4; }
};

class Sizeless : public td::datasets::Dataset<Sizeless> {
 public:
  td::Example<> get(size_t) override { return {}; }
  Size size() const override { return {}; }
};

TEST(TorchData, ExamplesBecomeBatches) {
  const auto expected_data = torch::tensor({{3.f, 4.f}, {0.f, 1.f}});
  const auto expected_target = torch::tensor({int64_t{30}, int64_t{0}});
  const auto plain = from_torch(Pairs());
  const auto stacked = from_torch(Pairs().map(td::transforms::Stack<>()));
  for (const auto& data : {plain, stacked}) {
    EXPECT_EQ(data->size(), 8);
    const Batch batch = data->get({3, 0});
    ASSERT_EQ(batch.tensors.size(), 2u);
    EXPECT_TRUE(same(batch.tensors[0], expected_data));
    EXPECT_TRUE(same(batch.tensors[1], expected_target));
    EXPECT_EQ(batch.samples, 2);
    EXPECT_EQ(batch.count, 2);
  }
  const auto normal = from_torch(
      Pairs().map(td::transforms::Normalize<>(1.0, 2.0)), {.name = "pairs"});
  // Normalize takes images: it adds a channel.
  EXPECT_TRUE(same(normal->get({3, 0}).tensors[0].view({2, 2}),
                   (expected_data - 1) / 2));
  EXPECT_EQ(normal->description(), "pairs, 8 samples");
  const auto alone =
      from_torch(td::datasets::TensorDataset(torch::arange(12).view({4, 3})));
  const Batch batch = alone->get({2, 1});
  ASSERT_EQ(batch.tensors.size(), 1u);
  EXPECT_TRUE(same(
      batch.tensors[0],
      torch::arange(12).view({4, 3}).index_select(0, torch::tensor({2, 1}))));
}

TEST(TorchData, OtherExamplesNeedAFunction) {
  const auto text = error_of([] { from_torch(Texts()); });
  EXPECT_NE(text.find("set TorchDataOptions::collate"), std::string::npos)
      << text;
  const auto data = from_torch(
      Texts(),
      {.collate =
           [](std::vector<Words> words) {
             std::vector<int64_t> lengths;
             for (const auto& one : words) {
               lengths.push_back(static_cast<int64_t>(one.text.size()));
             }
             return Batch{.tensors = {torch::tensor(lengths)}};
           },
       .count = [](int64_t index) { return index + 1; }});
  const Batch batch = data->get({3, 1});
  EXPECT_TRUE(same(batch.tensors[0], torch::tensor({4, 2})));
  EXPECT_EQ(batch.samples, 2);
  EXPECT_EQ(batch.count, 6);
  EXPECT_EQ(data->count(2), 3);
  EXPECT_NE(error_of([] { from_torch(Sizeless()); }).find("StreamDataset"),
            std::string::npos);
}

TEST(TorchData, IsReadByWorkers) {
  Loader loader(from_torch(Pairs()), {.batch = 1, .workers = 4});
  for (int epoch = 0; epoch < 20; ++epoch) {
    int64_t sum = 0;
    while (const auto batch = loader.next()) {
      sum += batch->tensors[1].item<int64_t>();
    }
    EXPECT_EQ(sum, 280);
  }
}

TEST(TorchData, SamplersDecideTheOrder) {
  const auto all = [](std::vector<int64_t> order) {
    std::sort(order.begin(), order.end());
    std::vector<int64_t> expected(order.size());
    std::iota(expected.begin(), expected.end(), int64_t{0});
    return order == expected;
  };
  torch::manual_seed(3);
  const auto next = torch::rand({1}).item<float>();
  const auto random = order_from(td::samplers::RandomSampler(2000));
  torch::manual_seed(3);
  EXPECT_TRUE(all(random(0, 1)));
  EXPECT_EQ(random(0, 1), random(0, 1));
  EXPECT_NE(random(0, 1), random(1, 1));
  EXPECT_NE(random(0, 1), random(0, 2));
  // The numbers of the training are the same as without the sampler.
  EXPECT_EQ(torch::rand({1}).item<float>(), next);

  const auto sequential = order_from(td::samplers::SequentialSampler(5));
  EXPECT_EQ(sequential(3, 9), (std::vector<int64_t>{0, 1, 2, 3, 4}));

  const auto shared = order_from(
      td::samplers::DistributedRandomSampler(50, /*num_replicas=*/1));
  EXPECT_TRUE(all(shared(0, 1)));
  EXPECT_EQ(shared(4, 1), shared(4, 1));
  EXPECT_NE(shared(4, 1), shared(5, 1));

  const auto data = with_order(from_torch(Pairs()),
                               order_from(td::samplers::RandomSampler(8)));
  Loader loader(data, {.batch = 8, .seed = 4});
  loader.next();
  loader.next();
  const auto order = order_from(td::samplers::RandomSampler(8))(1, 4);
  EXPECT_TRUE(same(loader.next()->tensors[1], 10 * torch::tensor(order)));
}

}  // namespace
