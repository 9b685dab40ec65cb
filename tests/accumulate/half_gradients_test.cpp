#include "accumulate/half_gradients.h"

#include "ops/stochastic_add.h"
#include "support.h"

namespace reprise {
namespace {

using detail::HalfGradients;
using testing::on_device;
using testing::same;
using torch::Tensor;

Tensor parameter(std::vector<int64_t> sizes) {
  return torch::randn(sizes, on_device()).requires_grad_();
}

class HalfGradientsTest : public ::testing::Test {
 protected:
  Tensor first_ = parameter({5, 3}), second_ = parameter({7}),
         unused_ = parameter({2});
  HalfGradients sums_{{{first_}, {}, {second_, unused_}}};

  /// A micro-batch whose gradients are filled with `value`.
  void backward(float value, uint64_t seed, bool last) {
    sums_.begin(seed, last);
    second_.mutable_grad() = torch::full_like(second_, value);
    sums_.final_from(1);
    if (!last) {
      EXPECT_FALSE(second_.grad().defined());
    }
    first_.mutable_grad() = torch::full_like(first_, 2 * value);
    sums_.final_from(0);
  }
};

TEST_F(HalfGradientsTest, AddsUpAndRestores) {
  backward(1, 1, false);
  backward(0.5, 2, false);
  EXPECT_FALSE(first_.grad().defined());
  EXPECT_EQ(sums_.sum(first_).scalar_type(), torch::kBFloat16);
  EXPECT_FALSE(sums_.sum(unused_).defined());
  // Too small for bfloat16 beside 1.5, but the last one is added exactly.
  const float last = 1.0F / 65536;
  backward(last, 3, true);
  EXPECT_TRUE(same(second_.grad(), torch::full_like(second_, 1.5F + last)));
  EXPECT_TRUE(same(first_.grad(), torch::full_like(first_, 3 + 2 * last)));
  EXPECT_FALSE(unused_.grad().defined());
  EXPECT_FALSE(sums_.sum(first_).defined());
}

TEST_F(HalfGradientsTest, AParameterWithoutALastGradientKeepsItsSum) {
  backward(1, 1, false);
  first_.mutable_grad().reset();
  sums_.begin(2, /*last=*/true);
  sums_.final_from(0);
  EXPECT_TRUE(same(first_.grad(), torch::full_like(first_, 2)));
  EXPECT_EQ(first_.grad().scalar_type(), torch::kFloat);
}

TEST_F(HalfGradientsTest, RoundsStochastically) {
  constexpr float kSmall = 1.0F / 4096;
  backward(1, 0, false);
  for (uint64_t i = 1; i <= 256; ++i) backward(kSmall, i << 40, false);
  const double sum = sums_.sum(first_).to(torch::kDouble).mean().item<double>();
  EXPECT_NEAR(sum, 2 + 256 * 2 * kSmall, 0.05);
  EXPECT_GT(sum, 2);
}

TEST_F(HalfGradientsTest, ForgetsAndIsRestoredFromASavedState) {
  backward(1.234F, 1, false);
  const Tensor saved = sums_.sum(first_).clone();
  sums_.forget();
  EXPECT_FALSE(sums_.sum(first_).defined());
  sums_.set_sum(first_, saved);
  backward(0, 2, true);
  EXPECT_TRUE(same(first_.grad(), saved.to(torch::kFloat)));
}

TEST_F(HalfGradientsTest, OtherLayoutsAndTypes) {
  // A gradient that is transposed in memory, and one that is not dense.
  const Tensor transposed = torch::randn({3, 5}, on_device()).t();
  const Tensor expanded = torch::randn({1, 3}, on_device()).expand({5, 3});
  sums_.begin(1, false);
  first_.mutable_grad() = transposed;
  sums_.final_from(0);
  sums_.begin(2, false);
  first_.mutable_grad() = expanded;
  sums_.final_from(0);
  sums_.begin(3, true);
  sums_.final_from(0);
  EXPECT_LE(testing::relative_error(first_.grad(), transposed + expanded),
            1e-2);

  Tensor exact = torch::ones({3}, on_device(torch::kDouble)).requires_grad_();
  HalfGradients sums({{exact}});
  for (const bool last : {false, false, true}) {
    sums.begin(1, last);
    exact.mutable_grad() = torch::full_like(exact, 0.1);
    sums.final_from(0);
  }
  EXPECT_TRUE(same(exact.grad(), torch::full_like(exact, 0.1 + 0.1 + 0.1)));
}

}  // namespace
}  // namespace reprise
