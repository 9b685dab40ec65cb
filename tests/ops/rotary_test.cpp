#include "linear_layer.h"
#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/attention.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/autograd.h>

#include <cmath>
#include <complex>

namespace reprise {
namespace {

using testing::error_of;
using testing::on_device;
using testing::relative_error;
using testing::same;
using torch::Tensor;

/// Cosines and sines (length, half) of random angles.
std::pair<Tensor, Tensor> angle_tables(int64_t length, int64_t half) {
  const Tensor angles = torch::randn({length, half}, on_device()) * 3;
  return {angles.cos(), angles.sin()};
}

/// Value and gradient of `run` on x, for the gradient dy of the result.
std::pair<Tensor, Tensor> rotary_results(const Tensor& x, const Tensor& dy,
                                         auto&& run) {
  const Tensor y = run(x);
  y.backward(dy);
  return {y.detach(), testing::take_gradients({x})[0]};
}

TEST(Rotary, MatchesFallbackInAllTypes) {
  torch::manual_seed(3);
  const std::vector<std::vector<int64_t>> shapes = {
      {2, 3, 5, 8}, {1, 1, 1, 2},  {7, 6},        {3, 11, 4},
      {2, 0, 5, 4}, {2, 3, 9, 64}, {1, 2, 5, 128}};
  for (const auto& sizes : shapes) {
    const auto tables = angle_tables(sizes[sizes.size() - 2], sizes.back() / 2);
    for (const auto type :
         {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      const Tensor x =
          torch::randn(sizes, on_device()).to(type).requires_grad_();
      const Tensor dy = torch::randn(sizes, on_device()).to(type);
      const auto wanted = rotary_results(x, dy, [&](const Tensor& t) {
        return ops::fallback::rotary(t, tables.first, tables.second);
      });
      const auto got = rotary_results(x, dy, [&](const Tensor& t) {
        return ops::rotary(t, tables.first, tables.second);
      });
      EXPECT_EQ(got.first.scalar_type(), type);
      EXPECT_EQ(got.second.scalar_type(), type);
      if (x.numel() == 0) continue;
      const double rounding = type == torch::kDouble  ? 1e-13
                              : type == torch::kFloat ? 1e-6
                              : type == torch::kHalf  ? 1e-3
                                                      : 1e-2;
      EXPECT_LE(relative_error(wanted.first, got.first), rounding) << type;
      EXPECT_LE(relative_error(wanted.second, got.second), rounding) << type;
    }
  }
}

TEST(Rotary, MultipliesComplexNumbers) {
  // The pair (x[i], x[i + D/2]) is a complex number, and the rotation its product with
  // exp(i angle).
  torch::manual_seed(4);
  const auto [cos, sin] = angle_tables(3, 2);
  const Tensor x = torch::randn({3, 4}, on_device());
  const Tensor y = ops::rotary(x, cos, sin);
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t i = 0; i < 2; ++i) {
      const std::complex<double> before(x[t][i].item<double>(),
                                        x[t][i + 2].item<double>());
      const auto after =
          before * std::complex<double>(cos[t][i].item<double>(),
                                        sin[t][i].item<double>());
      EXPECT_NEAR(y[t][i].item<double>(), after.real(), 1e-6);
      EXPECT_NEAR(y[t][i + 2].item<double>(), after.imag(), 1e-6);
    }
  }
}

TEST(Rotary, GradientIsTheInverseRotation) {
  torch::manual_seed(5);
  const auto [cos, sin] = angle_tables(6, 3);
  const Tensor x =
      torch::randn({2, 4, 6, 6}, on_device(torch::kDouble)).requires_grad_();
  // Of half the sum of squares: the rotation of the rotated x back, which is x.
  const auto c = cos.to(torch::kDouble), s = sin.to(torch::kDouble);
  const Tensor norm = (c * c + s * s).sqrt();
  (ops::rotary(x, c / norm, s / norm).square().sum() / 2).backward();
  EXPECT_LE(relative_error(x, x.grad()), 1e-14);

  // Finite differences with weights; the function is linear.
  const Tensor weights = torch::randn_like(x);
  const auto value = [&](const Tensor& t) {
    return (ops::rotary(t, c, s) * weights).sum().item<double>();
  };
  const Tensor gradient =
      torch::autograd::grad({(ops::rotary(x, c, s) * weights).sum()}, {x})[0];
  const Tensor direction = torch::randn_like(x);
  const torch::NoGradGuard no_grad;
  const double slope = (gradient * direction).sum().item<double>();
  EXPECT_NEAR(value(x + direction) - value(x), slope, 1e-10);
}

TEST(Rotary, KeepsTheOrderOfDimensions) {
  const auto [cos, sin] = angle_tables(5, 4);
  const Tensor heads = torch::randn({2, 5, 3, 8}, on_device()).transpose(1, 2);
  EXPECT_EQ(ops::rotary(heads, cos, sin).strides(), heads.strides());
  // A slice of a wider tensor is not dense: the order stays, without gaps.
  const Tensor wide = torch::randn({2, 5, 2 * 24}, on_device());
  const Tensor slice =
      wide.narrow(-1, 24, 24).view({2, 5, 3, 8}).transpose(1, 2);
  const Tensor turned = ops::rotary(slice, cos, sin);
  EXPECT_EQ(turned.strides(), heads.strides());
  EXPECT_TRUE(same(turned, ops::rotary(slice.contiguous(), cos, sin)));
}

TEST(Rotary, SavesNoActivation) {
  const auto [cos, sin] = angle_tables(64, 16);
  const Tensor leaf = torch::randn({4, 64, 32}, on_device()).requires_grad_();
  KeptMeter kept;
  const Tensor x = leaf * 1;
  const KeptMeter::Scope scope(kept, 0);
  const Tensor y = ops::rotary(x, cos, sin);
  EXPECT_EQ(kept.live_bytes(), 0);
  ASSERT_TRUE(y.requires_grad());
  const Tensor other = ops::fallback::rotary(x, cos, sin);
  EXPECT_GT(kept.live_bytes(), 0);
}

TEST(Rotary, UnderAutocastAndCheckpoint) {
  torch::manual_seed(6);
  const auto [cos, sin] = angle_tables(5, 2);
  const Tensor x = torch::randn({3, 5, 4}, on_device()).requires_grad_();
  const Tensor dy = torch::randn_like(x);
  const auto run = [cos = cos, sin = sin](const Tensor& t) {
    return ops::rotary(t, cos, sin);
  };
  const auto wanted = rotary_results(x, dy, run);
  const auto again = rotary_results(
      x, dy, [&](const Tensor& t) { return checkpoint(run, t); });
  EXPECT_TRUE(same(wanted.first, again.first));
  EXPECT_TRUE(same(wanted.second, again.second));
  const compat::AutocastGuard guard(testing::half());
  EXPECT_TRUE(same(wanted.first, run(x)));
}

TEST(Rotary, Errors) {
  const auto [cos, sin] = angle_tables(5, 2);
  const auto error = [&, c = cos, s = sin](std::vector<int64_t> sizes) {
    return error_of(
        [&] { ops::rotary(torch::zeros(sizes, on_device()), c, s); });
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(error({5, 3}), "with an even D, got [5, 3]"));
  EXPECT_TRUE(has(error({5, 6}), "got [5, 2] and [5, 2] for x [5, 6]"));
  EXPECT_TRUE(has(error({4, 4}), "for x [4, 4]"));
  const Tensor x = torch::randn({5, 4}, on_device()).requires_grad_();
  const Tensor sum = ops::rotary(x, cos, sin).sum();
  EXPECT_TRUE(
      has(error_of([&] { torch::autograd::grad({sum}, {x}, {}, true, true); }),
          "[rotary] has no second derivative"));
}

}  // namespace
}  // namespace reprise
