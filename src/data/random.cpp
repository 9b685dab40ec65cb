// Tested by tests/data/dataset_test.cpp.
#include "base/splitmix.h"
#include "data/named_dataset.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace reprise::detail {
namespace {

/// A counter-based random number generator for one sample.
class Stream {
 public:
  explicit Stream(uint64_t key) : key_(key) {}

  uint64_t next() { return splitmix(key_ + kStep * counter_++); }

  /// A number below `limit`. The bias is negligible because `limit` is far below 2^32.
  int64_t below(int64_t limit) {
    return static_cast<int64_t>(
        ((next() >> 32) * static_cast<uint64_t>(limit)) >> 32);
  }

  void fill(uint8_t* bytes, size_t count) {
    while (count > 0) {
      const uint64_t word = next();
      const size_t part = std::min(count, sizeof(word));
      std::memcpy(bytes, &word, part);
      bytes += part;
      count -= part;
    }
  }

 private:
  static constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;
  uint64_t key_;
  uint64_t counter_ = 0;
};

/// Random samples of the shape that the options give.
class RandomDataset : public Dataset {
 public:
  explicit RandomDataset(DataOptions options) : options_(std::move(options)) {}

  int64_t size() const override { return options_.random_samples; }
  int64_t count(int64_t /*index*/) const override {
    return language() ? options_.seq : 1;
  }
  // Mean and standard deviation of uniform bytes.
  double mean() const override { return options_.tokens ? 0 : 0.5; }
  double stddev() const override { return options_.tokens ? 1 : 0.2898; }

  Batch get(const std::vector<int64_t>& indices) const override {
    for (const int64_t index : indices) {
      TORCH_CHECK_INDEX(index >= 0 && index < size(),
                        "[dataset] expected a sample below ", size(), ", got ",
                        index);
    }
    return options_.tokens ? sequences(indices) : images(indices);
  }

  std::string fingerprint() const override { return sample_fingerprint(*this); }
  std::string description() const override {
    if (!options_.tokens) {
      return fmt::format("random, {} images of {}×{}×{}, {} classes", size(),
                         options_.channels, options_.random_side,
                         options_.random_side, options_.classes);
    }
    return fmt::format("random, {} samples of {} tokens below {}", size(),
                       options_.seq, options_.vocab);
  }

 private:
  bool language() const { return options_.tokens && !options_.classify; }

  Stream stream(int64_t index) const {
    const uint64_t half = options_.split == Split::kTest ? 1 : 0;
    return Stream(
        splitmix(splitmix(options_.seed, half), static_cast<uint64_t>(index)));
  }

  Batch images(const std::vector<int64_t>& indices) const {
    const auto count = static_cast<int64_t>(indices.size());
    const int64_t side = options_.random_side;
    const auto bytes = static_cast<size_t>(options_.channels * side * side);
    Batch batch{.tensors = {torch::empty({count, options_.channels, side, side},
                                         torch::kUInt8),
                            torch::empty({count}, torch::kLong)},
                .samples = count,
                .count = count};
    uint8_t* image = batch.tensors[0].data_ptr<uint8_t>();
    int64_t* label = batch.tensors[1].data_ptr<int64_t>();
    for (const int64_t index : indices) {
      Stream numbers = stream(index);
      *label++ = numbers.below(options_.classes);
      numbers.fill(image, bytes);
      image += bytes;
    }
    return batch;
  }

  Batch sequences(const std::vector<int64_t>& indices) const {
    const auto count = static_cast<int64_t>(indices.size());
    const int64_t seq = options_.seq;
    Batch batch{.tensors = {torch::empty({count, seq}, torch::kLong),
                            options_.classify
                                ? torch::empty({count}, torch::kLong)
                                : torch::empty({count, seq}, torch::kLong)},
                .samples = count,
                .count = language() ? count * seq : count};
    int64_t* input = batch.tensors[0].data_ptr<int64_t>();
    int64_t* target = batch.tensors[1].data_ptr<int64_t>();
    for (const int64_t index : indices) {
      Stream numbers = stream(index);
      if (options_.classify) *target++ = numbers.below(options_.classes);
      for (int64_t t = 0; t < seq; ++t)
        input[t] = numbers.below(options_.vocab);
      if (language()) {
        target = std::copy(input + 1, input + seq, target);
        *target++ = numbers.below(options_.vocab);
      }
      input += seq;
    }
    return batch;
  }

  DataOptions options_;
};

void check_positive(int64_t value, const char* name) {
  TORCH_CHECK(value > 0, "[dataset] random: expected ", name, " above 0, got ",
              value);
}

std::shared_ptr<const Dataset> open_random(const DataOptions& options) {
  check_positive(options.random_samples, "random_samples");
  if (options.tokens) {
    check_positive(options.seq, "seq");
    check_positive(options.vocab, "vocab");
  } else {
    check_positive(options.random_side, "random_side");
    check_positive(options.channels, "channels");
  }
  if (!options.tokens || options.classify) {
    check_positive(options.classes, "classes");
  }
  return std::make_shared<RandomDataset>(options);
}

}  // namespace

std::vector<NamedDataset> random_datasets() {
  return {{"random", open_random}};
}

}  // namespace reprise::detail
