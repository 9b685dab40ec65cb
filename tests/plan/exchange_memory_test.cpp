// Memory of gradients on the way. The truth are sums by hand; trainings compare them with
// measurements (tests/distributed/sharded_training_test.cpp).
#include "plan/exchange_memory.h"

#include <gtest/gtest.h>

namespace reprise::detail {
namespace {

/// Three buckets of 100 bytes, completed by stages 2, 1 and 0.
const std::vector<SentBucket> kBuckets = {
    {100, 100, 2}, {100, 100, 1}, {100, 100, 0}};
using Bytes = std::vector<int64_t>;

TEST(ExchangeMemory, OfSumsInPlace) {
  const auto memory =
      exchange_memory(kBuckets, 3, rules_of(Sharding::kNone, 4));
  EXPECT_EQ(memory.left, (Bytes{300, 200, 100}));
  EXPECT_EQ(memory.held, (Bytes{300, 200, 100}));
  // A bucket is filled beside its gradients.
  EXPECT_EQ(memory.peak, (Bytes{100, 100, 100}));
  EXPECT_EQ(memory.end_peak, 0);
  EXPECT_EQ(memory.sums, 300);
  EXPECT_EQ(memory.gather, 0);
}

TEST(ExchangeMemory, OfAnyNumberOfBucketsOnTheWay) {
  const auto memory =
      exchange_memory(kBuckets, 3, rules_of(Sharding::kOptimizer, 4));
  // Sent and received.
  EXPECT_EQ(memory.left, (Bytes{300, 200, 100}));
  EXPECT_EQ(memory.held, (Bytes{600, 400, 200}));
  EXPECT_EQ(memory.peak, (Bytes{100, 100, 100}));
  // The first sum beside all of them.
  EXPECT_EQ(memory.end_peak, 600 + 25 - 300);
  EXPECT_EQ(memory.sums, 75);
  EXPECT_EQ(memory.gather, 2 * 125);
}

TEST(ExchangeMemory, OfTwoBucketsOnTheWay) {
  const auto memory =
      exchange_memory(kBuckets, 3, rules_of(Sharding::kParameters, 4));
  EXPECT_EQ(memory.left, (Bytes{300, 200, 100}));
  // The first one is summed before the third one starts.
  EXPECT_EQ(memory.held, (Bytes{425, 400, 200}));
  EXPECT_EQ(memory.peak, (Bytes{25, 100, 100}));
  EXPECT_EQ(memory.end_peak, 425 + 25 - 300);
  EXPECT_EQ(memory.sums, 75);
  EXPECT_EQ(memory.gather, 0);
}

TEST(ExchangeMemory, OfGradientsThatStay) {
  ExchangeRules rules = rules_of(Sharding::kNone, 2);
  rules.keeps_gradients = true;
  const auto memory = exchange_memory(kBuckets, 3, rules);
  EXPECT_EQ(memory.left, (Bytes{0, 0, 0}));
  EXPECT_EQ(memory.held, (Bytes{300, 200, 100}));
  EXPECT_EQ(memory.sums, 300);
}

TEST(ExchangeMemory, OfHalfPrecision) {
  const auto memory = exchange_memory(
      kBuckets, 3, rules_of(Sharding::kGradients, 2, /*half=*/true));
  EXPECT_EQ(memory.held, (Bytes{50 + 200, 200, 100}));
  // In full precision, and in half of it.
  EXPECT_EQ(memory.peak[2], 100);
  EXPECT_EQ(memory.sums, 150);
}

}  // namespace
}  // namespace reprise::detail
