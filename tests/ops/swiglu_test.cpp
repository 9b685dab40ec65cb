#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/linear.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/autograd.h>

#include <cmath>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::on_device;
using testing::same;
using torch::Tensor;

/// Value and gradients of `run` on gate and up.
std::vector<Tensor> swiglu_results(const Tensor& gate, const Tensor& up,
                                   auto&& run) {
  const Tensor y = run(gate, up);
  torch::manual_seed(9);
  y.backward(torch::randn(y.sizes(), on_device()).to(y.scalar_type()));
  auto results = testing::take_gradients({gate, up});
  results.push_back(y.detach());
  return results;
}

/// Equal bits on the CPU; the kernel rounds once.
::testing::AssertionResult matches(const Tensor& wanted, const Tensor& got) {
  if (!device().is_cuda() || wanted.scalar_type() == torch::kDouble) {
    return same(wanted, got);
  }
  const double limit = wanted.scalar_type() == torch::kFloat  ? 1e-6
                       : wanted.scalar_type() == torch::kHalf ? 2e-3
                                                              : 1e-2;
  const double error = testing::relative_error(wanted, got);
  if (error <= limit) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "error " << error;
}

TEST(Swiglu, MatchesFallbackBitForBit) {
  torch::manual_seed(3);
  const std::vector<std::vector<int64_t>> shapes = {
      {2, 3, 8}, {5, 33}, {1}, {3, 257}, {0, 4}, {9, 40}};
  for (const auto& sizes : shapes) {
    for (const auto type :
         {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      const auto make = [&] {
        return (torch::randn(sizes, on_device()) * 4).to(type).requires_grad_();
      };
      const Tensor gate = make(), up = make();
      const auto wanted = swiglu_results(gate, up, ops::fallback::swiglu);
      const auto got = swiglu_results(gate, up, ops::swiglu);
      for (size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_EQ(got[i].scalar_type(), type);
        if (got[i].numel() == 0) continue;
        EXPECT_TRUE(matches(wanted[i], got[i])) << type << " " << i;
      }
    }
  }
}

TEST(Swiglu, MatchesDefinitionAndFiniteDifferences) {
  torch::manual_seed(4);
  const auto make = [] {
    return torch::randn({3, 5}, on_device(torch::kDouble)).requires_grad_();
  };
  const Tensor gate = make(), up = make();
  ops::swiglu(gate, up).square().sum().backward();
  const auto by_hand = [](double g, double u) {
    const double y = g / (1 + std::exp(-g)) * u;
    return y * y;
  };
  constexpr double kStep = 1e-6;
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j < 5; ++j) {
      const double g = gate[i][j].item<double>(), u = up[i][j].item<double>();
      EXPECT_NEAR(ops::swiglu(gate, up)[i][j].square().item<double>(),
                  by_hand(g, u), 1e-12);
      EXPECT_NEAR(gate.grad()[i][j].item<double>(),
                  (by_hand(g + kStep, u) - by_hand(g - kStep, u)) / (2 * kStep),
                  1e-7);
      EXPECT_NEAR(up.grad()[i][j].item<double>(),
                  (by_hand(g, u + kStep) - by_hand(g, u - kStep)) / (2 * kStep),
                  1e-7);
    }
  }
}

TEST(Swiglu, SavesItsInputs) {
  const Tensor leaf = torch::randn({64, 128}, on_device()).requires_grad_();
  const auto kept_by = [&](auto&& run) {
    KeptMeter kept;
    const Tensor gate = leaf * 1, up = leaf * 2;
    const KeptMeter::Scope scope(kept, 0);
    const Tensor y = run(gate, up);
    return kept.live_bytes();
  };
  const int64_t one = allocated_bytes(leaf.numel() * 4, device());
  EXPECT_EQ(kept_by(ops::swiglu), 2 * one);
  EXPECT_EQ(kept_by(ops::fallback::swiglu), 3 * one);
}

TEST(Swiglu, ViewsOfOneTensor) {
  torch::manual_seed(5);
  const Tensor both = torch::randn({2, 7, 10}, on_device()).requires_grad_();
  const auto run = [&](auto&& op) {
    const auto parts = both.split_with_sizes({5, 5}, -1);
    const Tensor y = op(parts[0], parts[1]);
    y.sin().sum().backward();
    auto results = testing::take_gradients({both});
    results.push_back(y.detach());
    return results;
  };
  const auto wanted = run(ops::fallback::swiglu);
  const auto got = run(ops::swiglu);
  const auto again = run([](const Tensor& a, const Tensor& b) {
    return checkpoint(
        [](const Tensor& g, const Tensor& u) { return ops::swiglu(g, u); }, a,
        b);
  });
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(same(wanted[i], got[i])) << i;
    EXPECT_TRUE(same(wanted[i], again[i])) << i;
  }
}

TEST(Swiglu, Packed) {
  torch::manual_seed(7);
  for (const int64_t columns : {5, 8, 48}) {
    for (const auto type : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      const Tensor both = torch::randn({3, 7, 2 * columns}, on_device())
                              .to(type)
                              .requires_grad_();
      const Tensor slope = torch::randn({3, 7, columns}, on_device()).to(type);
      // The definition in float64.
      const Tensor exact = both.detach().to(torch::kDouble).requires_grad_();
      const auto halves = exact.chunk(2, -1);
      const Tensor wanted = torch::silu(halves[0]) * halves[1];
      wanted.backward(slope.to(torch::kDouble));
      const Tensor y = ops::packed_swiglu(both * 1);
      y.backward(slope);
      const auto error = [](const Tensor& a, const Tensor& b) {
        return testing::relative_error(a.detach(), b.to(torch::kDouble));
      };
      const double limit = type == torch::kFloat  ? 1e-6
                           : type == torch::kHalf ? 2e-3
                                                  : 2e-2;
      EXPECT_EQ(y.scalar_type(), type);
      EXPECT_LE(error(wanted, y.detach()), limit) << columns << " " << type;
      EXPECT_LE(error(exact.grad(), both.grad()), limit)
          << columns << " " << type;
      const auto parts = both.detach().chunk(2, -1);
      EXPECT_TRUE(same(y.detach(), ops::swiglu(parts[0], parts[1])));
    }
  }
  const Tensor leaf = torch::randn({64, 128}, on_device()).requires_grad_();
  KeptMeter kept;
  const Tensor both = leaf * 1;
  const KeptMeter::Scope scope(kept, 0);
  const Tensor y = ops::packed_swiglu(both);
  EXPECT_EQ(kept.live_bytes(), allocated_bytes(leaf.numel() * 4, device()));
  EXPECT_NE(error_of([] {
              ops::packed_swiglu(torch::zeros({2, 5}, on_device()));
            }).find("[packed_swiglu] expected (…, 2 M), got [2, 5]"),
            std::string::npos);
}

TEST(Swiglu, GradientsThatAreNotNeeded) {
  torch::manual_seed(6);
  const auto make = [] {
    return torch::randn({4, 3}, on_device()).requires_grad_();
  };
  const Tensor gate = make(), up = make();
  const auto wanted = swiglu_results(gate, up, ops::swiglu);
  swiglu_results(gate, up, [&](const Tensor& g, const Tensor& u) {
    const Tensor y = ops::swiglu(g, u.detach());
    torch::manual_seed(9);
    y.backward(torch::randn(y.sizes(), on_device()));
    EXPECT_TRUE(same(g.grad(), wanted[0]));
    EXPECT_FALSE(u.grad().defined());
    return ops::swiglu(g.detach(), u);
  });
}

TEST(Swiglu, Errors) {
  const Tensor x = torch::randn({2, 4}, on_device()).requires_grad_();
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(error_of([&] { ops::swiglu(x, x.narrow(1, 0, 3)); }),
                  "[swiglu] expected gate and up of one shape and type, got "
                  "[2, 4] of Float and [2, 3] of Float"));
  EXPECT_TRUE(
      has(error_of([&] { ops::swiglu(x, x.to(torch::kDouble)); }), "Double"));
  const Tensor sum = ops::swiglu(x, x * 2).sum();
  EXPECT_TRUE(
      has(error_of([&] { torch::autograd::grad({sum}, {x}, {}, true, true); }),
          "[swiglu] has no second derivative"));
}

}  // namespace
}  // namespace reprise
