#include "support.h"

#include <reprise/data/loader.h>

#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <set>
#include <stdexcept>
#include <thread>

namespace {

using namespace reprise::testing;
using reprise::Batch;
using reprise::Loader;
using reprise::LoaderOptions;
using reprise::LoaderPosition;

/// Sample i has the value i and the count i + 1.
class Numbers : public reprise::Dataset {
 public:
  explicit Numbers(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  int64_t count(int64_t index) const override { return index + 1; }
  Batch get(const std::vector<int64_t>& indices) const override {
    if (delay_us > 0) {
      // Earlier batches often take longer than later ones.
      std::this_thread::sleep_for(
          std::chrono::microseconds(indices[0] * 7919 % delay_us));
    }
    reads += static_cast<int64_t>(indices.size());
    Batch batch;
    for (const int64_t index : indices) {
      if (index == broken) throw std::runtime_error("sample cannot be read");
      batch.count += count(index);
    }
    batch.tensors.push_back(torch::tensor(indices, torch::kLong));
    batch.tensors.push_back(batch.tensors[0].clone());
    batch.samples = static_cast<int64_t>(indices.size());
    return batch;
  }
  std::string description() const override { return "numbers"; }

  mutable std::atomic<int64_t> reads = 0;
  int64_t broken = -1;
  int64_t delay_us = 0;

 private:
  int64_t size_;
};

std::vector<int64_t> numbers_of(const Batch& batch) {
  const int64_t* data = batch.tensors[0].data_ptr<int64_t>();
  return {data, data + batch.tensors[0].numel()};
}

/// The batches of `epochs` epochs, with an empty one at the end of each epoch.
std::vector<std::vector<int64_t>> run(Loader& loader, int epochs) {
  std::vector<std::vector<int64_t>> batches;
  while (epochs > 0) {
    const auto batch = loader.next();
    batches.push_back(batch ? numbers_of(*batch) : std::vector<int64_t>{});
    if (!batch) --epochs;
  }
  return batches;
}

TEST(Loader, KeepsTheOrderWithoutShuffling) {
  Loader loader(std::make_shared<Numbers>(5), {.batch = 2, .shuffle = false});
  const std::vector<std::vector<int64_t>> expected = {{0, 1}, {2, 3}, {4}, {},
                                                      {0, 1}, {2, 3}, {4}, {}};
  EXPECT_EQ(run(loader, 2), expected);
}

TEST(Loader, ShufflesEveryEpochDifferently) {
  Loader loader(std::make_shared<Numbers>(100), {.batch = 100});
  const auto batches = run(loader, 3);
  ASSERT_EQ(batches.size(), 6u);
  EXPECT_NE(batches[0], batches[2]);
  EXPECT_NE(batches[2], batches[4]);
  for (auto batch : {batches[0], batches[2], batches[4]}) {
    EXPECT_FALSE(std::is_sorted(batch.begin(), batch.end()));
    EXPECT_EQ(std::set<int64_t>(batch.begin(), batch.end()).size(), 100u);
  }
  Loader other(std::make_shared<Numbers>(100), {.batch = 100, .seed = 2});
  EXPECT_NE(run(other, 1)[0], batches[0]);
}

/// The order must never change, or saved positions would refer to other samples.
TEST(Loader, OrderIsTheSameOnEveryMachine) {
  Loader loader(std::make_shared<Numbers>(10), {.batch = 10});
  const auto batches = run(loader, 2);
  EXPECT_EQ(batches[0], (std::vector<int64_t>{5, 0, 8, 7, 3, 1, 9, 6, 4, 2}));
  EXPECT_EQ(batches[2], (std::vector<int64_t>{6, 2, 8, 7, 4, 5, 9, 3, 0, 1}));
}

/// All permutations of three samples are equally likely.
TEST(Loader, ShufflesUniformly) {
  std::map<std::vector<int64_t>, int> seen;
  Loader loader(std::make_shared<Numbers>(3), {.batch = 3, .workers = 0});
  for (const auto& batch : run(loader, 6000)) {
    if (!batch.empty()) ++seen[batch];
  }
  EXPECT_EQ(seen.size(), 6u);
  for (const auto& [order, times] : seen) EXPECT_NEAR(times, 1000, 150);
}

TEST(Loader, OrderDoesNotDependOnTheNumberOfWorkers) {
  const auto data = std::make_shared<Numbers>(53);
  Loader alone(data, {.batch = 4, .workers = 0});
  const auto expected = run(alone, 3);
  data->delay_us = 500;
  for (const int workers : {1, 2, 5}) {
    for (const int queue : {0, 1, 40}) {
      Loader loader(data, {.batch = 4, .workers = workers, .queue = queue});
      EXPECT_EQ(run(loader, 3), expected) << workers << ", " << queue;
    }
  }
}

TEST(Loader, ResumesAtAnyPosition) {
  const auto data = std::make_shared<Numbers>(11);
  for (const int workers : {0, 3}) {
    const LoaderOptions options{.batch = 4, .workers = workers};
    Loader whole(data, options);
    std::vector<LoaderPosition> positions;
    std::vector<std::vector<int64_t>> expected;
    for (int i = 0; i < 12; ++i) {
      positions.push_back(whole.position());
      const auto batch = whole.next();
      expected.push_back(batch ? numbers_of(*batch) : std::vector<int64_t>{});
    }
    for (size_t i = 0; i < positions.size(); ++i) {
      Loader later(data, options, positions[i]);
      EXPECT_EQ(later.position(), positions[i]);
      for (size_t k = i; k < expected.size(); ++k) {
        const auto batch = later.next();
        EXPECT_EQ(batch ? numbers_of(*batch) : std::vector<int64_t>{},
                  expected[k])
            << "from " << i << " at " << k;
      }
      EXPECT_EQ(later.position(), whole.position());
    }
  }
}

TEST(Loader, PositionIgnoresBatchesReadAhead) {
  const auto data = std::make_shared<Numbers>(5);
  Loader loader(data, {.batch = 2, .workers = 2, .queue = 8});
  EXPECT_EQ(loader.position(), (LoaderPosition{0, 0}));
  loader.next();
  while (data->reads < 10) std::this_thread::yield();  // read far ahead
  EXPECT_EQ(loader.position(), (LoaderPosition{0, 2}));
  loader.next();
  loader.next();
  EXPECT_EQ(loader.position(), (LoaderPosition{0, 5}));
  EXPECT_FALSE(loader.next());
  EXPECT_EQ(loader.position(), (LoaderPosition{1, 0}));
}

TEST(Loader, ResumesAtTheSameSampleWithAnotherBatchSize) {
  const auto data = std::make_shared<Numbers>(10);
  Loader whole(data, {.batch = 10});
  const auto order = run(whole, 1)[0];
  Loader loader(data, {.batch = 3}, {0, 4});
  const auto batches = run(loader, 1);
  ASSERT_EQ(batches.size(), 3u);
  EXPECT_EQ(batches[0], std::vector<int64_t>(&order[4], &order[7]));
  EXPECT_EQ(batches[1], std::vector<int64_t>(&order[7], &order[7] + 3));
}

TEST(Loader, CountsAhead) {
  const auto data = std::make_shared<Numbers>(11);
  Loader loader(data, {.batch = 4});
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (int64_t left = 3; left > 0; --left) {
      EXPECT_EQ(loader.batches_left(), left);
      const int64_t rest = loader.count_ahead(left);
      EXPECT_EQ(loader.count_ahead(100), rest);
      EXPECT_EQ(loader.count_ahead(0), 0);
      const int64_t one = loader.count_ahead(1);
      EXPECT_EQ(loader.next()->count, one);
      EXPECT_EQ(loader.count_ahead(left - 1), rest - one);
    }
    EXPECT_EQ(loader.batches_left(), 0);
    EXPECT_EQ(loader.count_ahead(1), 0);
    EXPECT_FALSE(loader.next());
  }
}

TEST(Loader, LastBatchOfAWindowIsTheRemainder) {
  Loader loader(std::make_shared<Numbers>(12),
                {.batch = 2, .window = 5, .shuffle = false});
  const std::vector<std::vector<int64_t>> expected = {
      {0, 1}, {2, 3}, {4}, {5, 6}, {7, 8}, {9}, {10, 11}, {}};
  EXPECT_EQ(run(loader, 1), expected);
}

TEST(Loader, WindowsDoNotChangeTheOrder) {
  const auto data = std::make_shared<Numbers>(23);
  Loader whole(data, {.batch = 23});
  const auto order = run(whole, 1)[0];
  for (const int64_t window : {1, 4, 7, 10, 23, 30}) {
    for (const int64_t batch : {1, 2, 3, 5, 40}) {
      for (const int workers : {0, 2}) {
        const LoaderOptions options{
            .batch = batch, .window = window, .workers = workers};
        Loader loader(data, options);
        const auto batches = run(loader, 1);
        std::vector<int64_t> joined;
        Loader counting(data, options);
        for (size_t i = 0; i + 1 < batches.size(); ++i) {
          const auto left = static_cast<int64_t>(batches.size() - 1 - i);
          EXPECT_EQ(counting.batches_left(), left);
          int64_t two = 0;
          for (size_t k = i; k < std::min(i + 2, batches.size()); ++k) {
            for (const int64_t number : batches[k]) two += number + 1;
          }
          EXPECT_EQ(counting.count_ahead(2), two);
          // The position determines the place within the window.
          Loader later(data, options, counting.position());
          EXPECT_EQ(numbers_of(*later.next()), batches[i]);
          EXPECT_EQ(numbers_of(*counting.next()), batches[i]);
          const auto first = static_cast<int64_t>(joined.size());
          joined.insert(joined.end(), batches[i].begin(), batches[i].end());
          const auto last = static_cast<int64_t>(joined.size()) - 1;
          EXPECT_EQ(first / window, last / window);
        }
        EXPECT_EQ(joined, order) << window << ", " << batch;
      }
    }
  }
}

TEST(Loader, ReadsAheadAcrossEpochsUpToTheQueueSize) {
  const auto data = std::make_shared<Numbers>(4);
  Loader loader(data, {.batch = 2, .workers = 2, .queue = 3});
  while (data->reads < 6) std::this_thread::yield();  // 4 is an epoch
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(data->reads, 6);
}

TEST(Loader, ThrowsAnErrorAtItsPositionAndAgainAfterwards) {
  const auto data = std::make_shared<Numbers>(10);
  data->broken = 5;
  for (const int workers : {0, 3}) {
    Loader loader(data, {.batch = 2, .shuffle = false, .workers = workers});
    EXPECT_EQ(numbers_of(*loader.next()), (std::vector<int64_t>{0, 1}));
    EXPECT_EQ(numbers_of(*loader.next()), (std::vector<int64_t>{2, 3}));
    EXPECT_THROW(loader.next(), std::runtime_error);
    EXPECT_THROW(loader.next(), std::runtime_error);
    EXPECT_EQ(loader.position(), (LoaderPosition{0, 4}));
  }
}

TEST(Loader, RunsTransformOncePerBatchInNoGradMode) {
  std::atomic<int> calls = 0;
  std::atomic<bool> recorded = false;
  const auto transform = [&](Batch& batch) {
    ++calls;
    if (torch::GradMode::is_enabled()) recorded = true;
    batch.tensors[0] = batch.tensors[0].to(torch::kFloat) * 2;
  };
  for (const int workers : {0, 2}) {
    calls = 0;
    Loader loader(std::make_shared<Numbers>(4), {.batch = 2,
                                                 .shuffle = false,
                                                 .workers = workers,
                                                 .queue = 1,
                                                 .transform = transform});
    EXPECT_TRUE(same(loader.next()->tensors[0], torch::tensor({0.f, 2.f})));
    EXPECT_TRUE(same(loader.next()->tensors[0], torch::tensor({4.f, 6.f})));
    EXPECT_GE(calls, 2);
    EXPECT_LE(calls, 3);
    EXPECT_FALSE(recorded);
  }
}

TEST(Loader, MeasuresTheTimeSpentWaiting) {
  class Slow : public Numbers {
   public:
    using Numbers::Numbers;
    Batch get(const std::vector<int64_t>& indices) const override {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      return Numbers::get(indices);
    }
  };
  for (const int workers : {0, 1}) {
    Loader loader(std::make_shared<Slow>(100), {.workers = workers});
    EXPECT_EQ(loader.waited_s(), 0);
    loader.next();
    loader.next();
    EXPECT_GT(loader.waited_s(), 0.04);
  }
}

TEST(Loader, DestructsWhileWorkersAreBusyOrTheQueueIsFull) {
  const auto data = std::make_shared<Numbers>(50);
  data->delay_us = 300;
  for (int i = 0; i < 40; ++i) {
    Loader loader(data, {.batch = 2, .workers = 3});
    for (int k = 0; k < i % 5; ++k) loader.next();
    if (i % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
}

TEST(Loader, ReturnsPinnedMemory) {
  const auto data = std::make_shared<Numbers>(4);
  if (torch::cuda::is_available()) {
    Loader loader(data, {.batch = 2, .pin = true});
    const auto batch = loader.next();
    EXPECT_TRUE(batch->tensors[0].is_pinned());
    EXPECT_TRUE(batch->tensors[1].is_pinned());
  } else {
    EXPECT_NE(error_of([&] {
                Loader loader(data, {.pin = true});
              }).find("CUDA device"),
              std::string::npos);
  }
}

TEST(Loader, RejectsInvalidOptions) {
  const auto data = std::make_shared<Numbers>(4);
  const auto expect_rejected = [&](const LoaderOptions& options,
                                   LoaderPosition position, const char* part) {
    const std::string text =
        error_of([&] { Loader loader(data, options, position); });
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect_rejected({.batch = 0}, {}, "batch above 0");
  expect_rejected({.window = -1}, {}, "window");
  expect_rejected({.workers = -1}, {}, "workers");
  expect_rejected({}, {0, 5}, "at most 4 samples");
  expect_rejected({}, {-1, 0}, "epoch -1");
  EXPECT_NE(error_of([] {
              Loader loader(std::make_shared<Numbers>(0), {});
            }).find("dataset with samples"),
            std::string::npos);
}

TEST(Loader, ShardsPartitionEveryWindowInOrder) {
  const auto data = std::make_shared<Numbers>(23);
  const auto order_of = [&](LoaderOptions options) {
    std::vector<int64_t> order;
    Loader loader(data, options);
    while (auto batch = loader.next()) {
      for (const int64_t n : numbers_of(*batch)) order.push_back(n);
    }
    return order;
  };
  const auto alone = order_of({.batch = 10, .window = 10, .workers = 0});
  for (const int num_shards : {1, 2, 3, 4}) {
    std::vector<std::unique_ptr<Loader>> loaders;
    for (int shard = 0; shard < num_shards; ++shard) {
      loaders.push_back(
          std::make_unique<Loader>(data, LoaderOptions{.batch = 2,
                                                       .window = 10,
                                                       .shard = shard,
                                                       .num_shards = num_shards,
                                                       .workers = shard}));
    }
    std::vector<int64_t> together;
    int64_t windows = 0;
    while (!loaders[0]->epoch_done()) {
      int64_t count = 0, total = 0, samples = 0;
      for (auto& loader : loaders) {
        EXPECT_EQ(loader->position().sample, 10 * windows);
        const auto window = loader->window_ahead();
        EXPECT_EQ(window.samples, std::min<int64_t>(10, 23 - 10 * windows));
        int64_t own = 0;
        for (int64_t i = 0; i < window.batches; ++i) {
          const auto batch = loader->next();
          own += batch->count;
          samples += batch->samples;
          for (const int64_t n : numbers_of(*batch)) together.push_back(n);
        }
        EXPECT_EQ(own, window.count);
        count += window.count;
        total = window.total_count;
        loader->advance_window();
      }
      EXPECT_EQ(count, total);
      EXPECT_EQ(samples, std::min<int64_t>(10, 23 - 10 * windows));
      ++windows;
    }
    EXPECT_EQ(windows, 3);
    EXPECT_EQ(together, alone) << num_shards;
    for (auto& loader : loaders) {
      EXPECT_TRUE(loader->epoch_done());
      EXPECT_FALSE(loader->next());
      EXPECT_EQ(loader->position(), (LoaderPosition{1, 0}));
    }
  }
}

TEST(Loader, ShardsTheRemainderOfAWindow) {
  const auto data = std::make_shared<Numbers>(20);
  std::vector<int64_t> found;
  for (int shard = 0; shard < 2; ++shard) {
    Loader loader(data,
                  {.batch = 8,
                   .window = 10,
                   .shard = shard,
                   .num_shards = 2,
                   .shuffle = false,
                   .workers = 0},
                  {0, 5});
    const auto window = loader.window_ahead();
    EXPECT_EQ(window.samples, 5);
    EXPECT_EQ(window.batches, 1);
    for (const int64_t n : numbers_of(*loader.next())) found.push_back(n);
  }
  EXPECT_EQ(found, (std::vector<int64_t>{5, 6, 7, 8, 9}));
}

TEST(Loader, RejectsMoreShardsThanSamples) {
  const auto data = std::make_shared<Numbers>(20);
  const auto make = [&](int64_t window, int shard, int num_shards) {
    return error_of([&] {
      Loader loader(
          data, {.window = window, .shard = shard, .num_shards = num_shards});
    });
  };
  EXPECT_NE(make(3, 0, 4).find("for each of 4 shards"), std::string::npos);
  EXPECT_NE(make(0, 0, 2).find("for each of 2 shards"), std::string::npos);
  EXPECT_NE(make(10, 2, 2).find("a shard below 2, got 2"), std::string::npos);
}

}  // namespace
