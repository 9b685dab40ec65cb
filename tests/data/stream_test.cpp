#include "support.h"

#include <reprise/data/loader.h>
#include <reprise/data/stream.h>

#include <gtest/gtest.h>

#include <stdexcept>

namespace {

using namespace reprise::testing;
using reprise::Batch;
using reprise::Loader;
using reprise::LoaderOptions;
using reprise::LoaderPosition;
using reprise::SampleStream;
using reprise::StreamDataset;

/// 0, 1, 2, … Sample i has the count i % 5. Positions are bytes that are not text.
class Counting final : public StreamDataset {
 public:
  class Reader final : public SampleStream {
   public:
    Reader(const Counting& data, int64_t at) : data_(data), at_(at) {}
    Batch read(int64_t samples) override {
      Batch batch{.tensors = {torch::arange(at_, at_ + samples)},
                  .samples = samples + data_.wrong_samples};
      for (int64_t i = 0; i < samples; ++i) batch.count += (at_ + i) % 5;
      at_ += samples;
      if (data_.broken >= 0 && at_ > data_.broken) {
        throw std::runtime_error("sample cannot be read");
      }
      return batch;
    }
    std::string position() const override {
      return data_.lost ? "" : std::string("\xff\0", 2) + std::to_string(at_);
    }

   private:
    const Counting& data_;
    int64_t at_;
  };

  std::unique_ptr<SampleStream> open(
      const std::string& position) const override {
    if (none) return nullptr;
    return std::make_unique<Reader>(
        *this, position.empty() ? 0 : std::stoll(position.substr(2)));
  }
  std::string description() const override { return "counting"; }

  int64_t broken = -1;
  int64_t wrong_samples = 0;
  bool lost = false, none = false;
};

std::vector<int64_t> samples_in(const Batch& batch) {
  const auto* data = batch.tensors[0].data_ptr<int64_t>();
  return {data, data + batch.tensors[0].numel()};
}

int64_t counts(int64_t begin, int64_t end) {
  int64_t sum = 0;
  for (; begin < end; ++begin) sum += begin % 5;
  return sum;
}

TEST(Stream, IsCutIntoWindowsAndBatches) {
  const auto data = std::make_shared<Counting>();
  for (const int workers : {0, 2}) {
    Loader loader(data, {.batch = 3, .window = 7, .workers = workers});
    for (int64_t window = 0; window < 4; ++window) {
      const int64_t begin = 7 * window;
      for (const int64_t at : {0, 3, 6}) {
        const auto ahead = loader.window_ahead();
        EXPECT_EQ(ahead.batches, (7 - at + 2) / 3);
        EXPECT_EQ(ahead.samples, 7 - at);
        EXPECT_EQ(ahead.total_count, counts(begin + at, begin + 7));
        EXPECT_EQ(ahead.count, ahead.total_count);
        EXPECT_EQ(loader.batches_left(), ahead.batches);
        const auto batch = loader.next();
        ASSERT_TRUE(batch);
        EXPECT_EQ(batch->samples, at == 6 ? 1 : 3);
        EXPECT_EQ(samples_in(*batch).front(), begin + at);
        EXPECT_EQ(loader.window_done(), at == 6);
        EXPECT_EQ(loader.position().sample,
                  begin + std::min(at + 3, int64_t{7}));
        EXPECT_FALSE(loader.epoch_done());
      }
    }
  }
}

/// At every position, with every other batch size, nothing is lost or repeated.
TEST(Stream, ContinuesAtEveryPosition) {
  const auto data = std::make_shared<Counting>();
  for (const int workers : {0, 1}) {
    for (int stop = 0; stop < 8; ++stop) {
      for (const int64_t batch : {1, 2, 5}) {
        LoaderOptions options{.batch = 3, .window = 7, .workers = workers};
        std::vector<int64_t> found;
        const auto take = [&](Loader& loader) {
          const auto some = samples_in(*loader.next());
          found.insert(found.end(), some.begin(), some.end());
        };
        LoaderPosition position;
        {
          Loader loader(data, options);
          for (int i = 0; i < stop; ++i) take(loader);
          position = loader.position();
        }
        EXPECT_EQ(position.sample, static_cast<int64_t>(found.size()));
        options.batch = batch;
        Loader loader(data, options, position);
        EXPECT_EQ(loader.window_done(), position.sample % 7 == 0);
        EXPECT_EQ(loader.window_ahead().samples, 7 - position.sample % 7);
        while (found.size() < 28) take(loader);
        ASSERT_EQ(found.size(), 28u);  // no batch spans two windows
        for (int64_t i = 0; i < 28; ++i) {
          EXPECT_EQ(found[static_cast<size_t>(i)], i);
        }
      }
    }
  }
}

TEST(Stream, ShardsDivideEveryWindow) {
  const auto data = std::make_shared<Counting>();
  for (const int64_t begin : {0, 3}) {
    const LoaderPosition from =
        begin == 0 ? LoaderPosition{}
                   : LoaderPosition{0, begin, std::string("\xff\0", 2) + "3"};
    std::vector<int64_t> found;
    std::vector<std::vector<int64_t>> by_window(2);
    for (int shard = 0; shard < 3; ++shard) {
      Loader loader(data,
                    {.batch = 2, .window = 8, .shard = shard, .num_shards = 3},
                    from);
      for (size_t window = 0; window < 2; ++window) {
        const int64_t first = window == 0 ? begin : 8;
        const auto ahead = loader.window_ahead();
        EXPECT_EQ(ahead.samples, (window + 1) * 8 - first);
        EXPECT_EQ(ahead.total_count,
                  counts(first, 8 * (static_cast<int64_t>(window) + 1)));
        int64_t count = 0;
        for (int64_t i = 0; i < ahead.batches; ++i) {
          EXPECT_FALSE(loader.window_done());
          const auto batch = loader.next();
          count += batch->count;
          const auto some = samples_in(*batch);
          by_window[window].insert(by_window[window].end(), some.begin(),
                                   some.end());
          EXPECT_EQ(loader.position().sample, first);
        }
        EXPECT_EQ(count, ahead.count);
        EXPECT_TRUE(loader.window_done());
        loader.advance_window();
        EXPECT_EQ(loader.position().sample,
                  8 * (static_cast<int64_t>(window) + 1));
      }
    }
    for (const auto& list : by_window) {
      found.insert(found.end(), list.begin(), list.end());
    }
    ASSERT_EQ(found.size(), static_cast<size_t>(16 - begin));
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i], static_cast<int64_t>(i) + begin);
    }
  }
}

TEST(Stream, FirstSamplesCanBeReadAsADataset) {
  const Counting data;
  EXPECT_EQ(samples_in(data.get({0, 1, 2})), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(samples_in(data.largest(2)), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(data.size(), StreamDataset::kEndless);
  EXPECT_NE(error_of([&] { data.get({1}); }).find("got index 1 at 0"),
            std::string::npos);
}

TEST(Stream, ErrorsStayAtTheirPlace) {
  const auto data = std::make_shared<Counting>();
  data->broken = 9;
  for (const int workers : {0, 1}) {
    Loader loader(data, {.batch = 4, .window = 4, .workers = workers});
    loader.next();
    loader.next();
    for (int i = 0; i < 2; ++i) EXPECT_THROW(loader.next(), std::runtime_error);
    EXPECT_EQ(loader.position().sample, 8);
  }
}

TEST(Stream, ErrorsSayWhatToDo) {
  const auto expect = [](const std::function<void(Counting&)>& change,
                         const LoaderPosition& position,
                         const std::string& part) {
    const auto data = std::make_shared<Counting>();
    change(*data);
    const auto text = error_of([&] {
      Loader loader(data, {.batch = 2, .window = 4, .workers = 0}, position);
      loader.next();
    });
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect([](Counting& data) { data.none = true; }, {},
         "expected open() to return a reader, got null");
  expect([](Counting& data) { data.lost = true; }, {},
         "expected a position() with at least one byte after 2 samples");
  expect([](Counting& data) { data.wrong_samples = -1; }, {},
         "of the 2 samples asked for, got 1");
  expect([](Counting&) {}, {0, 3, ""},
         "sample 3 without the position of a stream; was it saved with");
  expect([](Counting&) {}, {1, 0, ""}, "got epoch 1");
  const auto text = error_of([] {
    Loader loader(std::make_shared<Counting>(),
                  {.batch = 1, .window = 2, .num_shards = 3});
  });
  EXPECT_NE(text.find("one sample per window for each of 3 shards"),
            std::string::npos)
      << text;
}

}  // namespace
