#include "compat/rng.h"
#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/dropout.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/autograd.h>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::on_device;
using testing::same;
using torch::Tensor;

TEST(Dropout, IsThePlainOneInEveryBit) {
  for (const auto type : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    for (const double p : {0.0, 0.1, 0.37, 0.5, 0.9, 1.0}) {
      for (const bool train : {false, true}) {
        const Tensor x =
            torch::randn({33, 17}, on_device(type)).requires_grad_();
        const Tensor weights = torch::randn({33, 17}, on_device(type));
        torch::manual_seed(5);
        const Tensor a = torch::dropout(x, p, train);
        const auto after = compat::RngState::capture({x});
        a.backward(weights);
        const Tensor expected = testing::take_gradients({x})[0];
        torch::manual_seed(5);
        const Tensor b = lean_dropout(x, p, train);
        EXPECT_TRUE(after == compat::RngState::capture({x})) << p;
        EXPECT_TRUE(same(a, b)) << p;
        b.backward(weights);
        EXPECT_TRUE(same(expected, x.grad())) << p;
      }
    }
  }
}

TEST(Dropout, OtherLayouts) {
  const Tensor leaf = torch::randn({6, 8}, on_device()).requires_grad_();
  const Tensor x = leaf.t();
  torch::manual_seed(5);
  const Tensor a = torch::dropout(x, 0.4, true);
  torch::manual_seed(5);
  const Tensor b = lean_dropout(x, 0.4, true);
  EXPECT_TRUE(same(a, b));
  EXPECT_EQ(a.strides(), b.strides());
}

TEST(Dropout, KeepsAByteAValue) {
  const Tensor leaf = torch::randn({64, 64}, on_device()).requires_grad_();
  const auto kept_by = [&](auto&& run) {
    KeptMeter kept;
    const Tensor x = leaf * 1;
    const KeptMeter::Scope scope(kept, 0);
    const Tensor y = run(x);
    return kept.live_bytes();
  };
  const int64_t plain =
      kept_by([](const Tensor& x) { return torch::dropout(x, 0.3, true); });
  const int64_t lean =
      kept_by([](const Tensor& x) { return lean_dropout(x, 0.3, true); });
  EXPECT_EQ(lean, allocated_bytes(leaf.numel(), device()));
  EXPECT_EQ(plain, device().is_cpu() ? 4 * lean : lean);
}

TEST(Dropout, FiniteDifferences) {
  Tensor x = torch::randn({4, 5}, on_device(torch::kDouble));
  const Tensor input = x.clone().requires_grad_();
  const auto value = [](const Tensor& t) {
    torch::manual_seed(3);
    return lean_dropout(t, 0.4, true).square().sum();
  };
  value(input).backward();
  const Tensor gradient = input.grad().flatten();
  Tensor flat = x.view({-1});
  constexpr double kStep = 1e-6;
  for (int64_t i = 0; i < flat.numel(); ++i) {
    const double before = flat[i].item<double>();
    flat[i] = before + kStep;
    const double above = value(x).item<double>();
    flat[i] = before - kStep;
    const double below = value(x).item<double>();
    flat[i] = before;
    EXPECT_NEAR((above - below) / (2 * kStep), gradient[i].item<double>(),
                1e-7);
  }
}

TEST(Dropout, UnderCheckpoint) {
  const Tensor x = torch::randn({20, 20}, on_device()).requires_grad_();
  const auto run = [](const Tensor& t) {
    return lean_dropout(t * 2, 0.4, true).square();
  };
  torch::manual_seed(8);
  run(x).sum().backward();
  const Tensor expected = testing::take_gradients({x})[0];
  torch::manual_seed(8);
  checkpoint(run, x).sum().backward();
  EXPECT_TRUE(same(expected, x.grad()));
}

TEST(Dropout, ErrorsAreClear) {
  if (!device().is_cpu()) GTEST_SKIP() << "LibTorch's own there";
  const Tensor x = torch::randn({4, 5}, on_device()).requires_grad_();
  const Tensor sum = lean_dropout(x, 0.4, true).sum();
  EXPECT_NE(error_of([&] {
              torch::autograd::grad({sum}, {x}, {}, true, true);
            }).find("[lean_dropout] has no second derivative"),
            std::string::npos);
  EXPECT_NE(error_of([&] { lean_dropout(x, 1.5, true); }).find("between 0 and"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
