#include "compat/denormals.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <limits>

namespace reprise::compat {
namespace {

/// Non-zero products of normal numbers whose exact values are all denormal.
int64_t denormal_products() {
  const auto a = torch::full({256, 256}, 1e-20F);
  const auto b = torch::eye(256) * 1e-19F;
  const auto c = torch::mm(a, b);
  // As bits, which no mode of the arithmetic changes.
  return (c.view(torch::kInt) != 0).sum().item<int64_t>();
}

/// Non-zero results of an elementwise operation that every thread has a part in.
int64_t denormal_elements() {
  const auto c = torch::full({1 << 20}, 1e-20F) * 1e-19F;
  return (c.view(torch::kInt) != 0).sum().item<int64_t>();
}

TEST(Denormals, AreFlushedOnEveryThreadWhileTheScopeLives) {
  const torch::NoGradGuard no_grad;
  ASSERT_FALSE(flushes_denormals());
  ASSERT_EQ(denormal_elements(), 1 << 20);
  {
    const FlushDenormals flush(torch::kCPU);
    ASSERT_TRUE(flush.active());
    EXPECT_TRUE(flushes_denormals());
    EXPECT_EQ(denormal_elements(), 0);
    EXPECT_EQ(denormal_products(), 0);
    {
      const FlushDenormals inner(torch::kCPU);
      EXPECT_FALSE(inner.active());
    }
    EXPECT_EQ(denormal_products(), 0);
  }
  EXPECT_FALSE(flushes_denormals());
  EXPECT_EQ(denormal_elements(), 1 << 20);
}

TEST(Denormals, OtherDevicesAreLeftAlone) {
  const FlushDenormals flush(torch::kCUDA);
  EXPECT_FALSE(flush.active());
  EXPECT_FALSE(flushes_denormals());
}

TEST(Denormals, NormalNumbersAreNotChanged) {
  torch::manual_seed(1);
  const auto a = torch::randn({300, 200});
  const auto b = torch::randn({200, 100});
  const auto before = torch::mm(a, b);
  const FlushDenormals flush(torch::kCPU);
  EXPECT_TRUE(torch::equal(torch::mm(a, b), before));
}

TEST(Denormals, ShareCountsThemAndNothingElse) {
  const float least = std::numeric_limits<float>::min();
  auto values = torch::tensor(
      {0.0F, -0.0F, 1.0F, least, -least, least / 2, -least / 4, 1e-45F});
  EXPECT_DOUBLE_EQ(denormal_share({values}), 3.0 / 8);
  // A large tensor is sampled in all of its columns.
  auto large = torch::zeros({2048, 1024});
  large.select(1, 5).fill_(least / 2);
  EXPECT_NEAR(denormal_share({large}), 1.0 / 1024, 2e-4);
  const FlushDenormals flush(torch::kCPU);
  EXPECT_DOUBLE_EQ(denormal_share({values}), 3.0 / 8);
  EXPECT_DOUBLE_EQ(denormal_share({values, torch::ones({8}), torch::Tensor()}),
                   3.0 / 16);
  EXPECT_EQ(denormal_share({}), 0);
}

}  // namespace
}  // namespace reprise::compat
