#include "ops/stochastic_add.h"

#include "support.h"

#include <cmath>
#include <limits>

namespace reprise {
namespace {

using detail::add_stochastically;
using testing::device;
using testing::error_of;
using testing::on_device;
using testing::same;
using torch::Tensor;

Tensor half(const Tensor& values) {
  return values.to(torch::kBFloat16);
}

/// The nearest bfloat16 numbers below and above, by clearing the low bits.
std::pair<Tensor, Tensor> neighbours(const Tensor& values) {
  const Tensor bits = values.contiguous().view(torch::kInt);
  const Tensor inner = bits.bitwise_and(~0xffff);
  const Tensor outer = torch::where(bits.eq(inner), inner, inner + 0x10000);
  return {inner.view(torch::kFloat), outer.view(torch::kFloat)};
}

TEST(StochasticAdd, ResultIsANeighbourOfTheExactSum) {
  torch::manual_seed(1);
  for (const int64_t size : {1, 3, 4, 1001, 40000}) {
    const Tensor sums = half(torch::randn({size}, on_device()));
    const Tensor values = torch::randn({size}, on_device()) * 0.1;
    const Tensor exact = sums.to(torch::kFloat) + values;
    Tensor result = sums.clone();
    add_stochastically(result, values, 7);
    const auto [inner, outer] = neighbours(exact);
    const Tensor found = result.to(torch::kFloat);
    EXPECT_TRUE((found.eq(inner) | found.eq(outer)).all().item<bool>());
    if (size < 1000) continue;
    // Both occur, and other seeds give other results.
    EXPECT_FALSE(found.eq(inner).all().item<bool>());
    EXPECT_FALSE(found.eq(outer).all().item<bool>());
    Tensor other = sums.clone(), again = sums.clone();
    add_stochastically(other, values, 8);
    add_stochastically(again, values, 7);
    EXPECT_FALSE(torch::equal(other, result));
    EXPECT_TRUE(torch::equal(again, result));
  }
}

/// Of n results with a share p of upper ones, the mean has a deviation of √(p (1 − p) / n)
/// steps.
TEST(StochasticAdd, TheExpectedValueIsExact) {
  constexpr int64_t kCount = 1 << 20;
  for (const double value :
       {1.0009765625, 1.003, 1.0071, -1.002, 3e-5, -700.3}) {
    const Tensor values =
        torch::full({kCount}, static_cast<float>(value), on_device());
    Tensor result = torch::zeros({kCount}, on_device(torch::kBFloat16));
    add_stochastically(result, values, 3);
    const auto [inner, outer] = neighbours(values.narrow(0, 0, 1));
    const double step = std::abs((outer - inner).item<double>());
    const double mean = result.to(torch::kDouble).mean().item<double>();
    EXPECT_NEAR(mean, values[0].item<double>(),
                5 * step * 0.5 / std::sqrt(double(kCount)))
        << value;
  }
}

TEST(StochasticAdd, SmallValuesAddUp) {
  Tensor sums = torch::ones({4096}, on_device(torch::kBFloat16));
  Tensor rounded = sums.clone();
  const Tensor small = torch::full({4096}, 1.0F / 2048, on_device());
  for (int i = 0; i < 2048; ++i) {
    add_stochastically(sums, small, static_cast<uint64_t>(i));
    rounded.copy_(rounded.to(torch::kFloat) + small);
  }
  EXPECT_EQ(rounded.to(torch::kFloat).max().item<double>(), 1);
  EXPECT_NEAR(sums.to(torch::kDouble).mean().item<double>(), 2, 0.01);
}

TEST(StochasticAdd, ValuesThatAreNotFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  const Tensor values = torch::tensor(
      {infinity, -infinity, std::numeric_limits<float>::quiet_NaN(), 0.0F},
      on_device());
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Tensor sums = torch::ones({4}, on_device(torch::kBFloat16));
    add_stochastically(sums, values, seed);
    EXPECT_EQ(sums[0].item<float>(), infinity);
    EXPECT_EQ(sums[1].item<float>(), -infinity);
    EXPECT_TRUE(std::isnan(sums[2].item<float>()));
    EXPECT_EQ(sums[3].item<float>(), 1);
  }
}

TEST(StochasticAdd, DevicesAgree) {
  torch::manual_seed(2);
  const Tensor sums = half(torch::randn({33, 17})),
               values = torch::randn({33, 17});
  Tensor here = sums.clone(), there = sums.to(device());
  add_stochastically(here, values, 5);
  add_stochastically(there, values.to(device()), 5);
  EXPECT_TRUE(same(here, there.cpu()));
}

TEST(StochasticAdd, RejectsOtherTensors) {
  const Tensor sums = torch::zeros({2, 3}, torch::kBFloat16);
  const auto error = [&](const Tensor& values) {
    return error_of([&] { add_stochastically(sums, values, 0); });
  };
  EXPECT_NE(error(torch::zeros({3, 2})).find("one shape"), std::string::npos);
  EXPECT_NE(error(sums).find("bfloat16 and float32"), std::string::npos);
  EXPECT_NE(error(torch::zeros({3, 2}).t()).find("one layout"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
