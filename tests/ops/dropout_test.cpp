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

TEST(Dropout, MatchesLibTorchBitForBit) {
  for (const auto type : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    for (const double p : {0.0, 0.1, 0.37, 0.5, 0.9, 1.0}) {
      for (const bool train : {false, true}) {
        const Tensor x =
            torch::randn({33, 17}, on_device(type)).requires_grad_();
        const Tensor weights = torch::randn({33, 17}, on_device(type));
        torch::manual_seed(5);
        const Tensor a = ops::fallback::dropout(x, p, train);
        const auto after = compat::RngState::capture({x});
        a.backward(weights);
        const Tensor expected = testing::take_gradients({x})[0];
        torch::manual_seed(5);
        const Tensor b = ops::dropout(x, p, train);
        EXPECT_TRUE(after == compat::RngState::capture({x})) << p;
        EXPECT_TRUE(same(a, b)) << p;
        b.backward(weights);
        EXPECT_TRUE(same(expected, x.grad())) << p;
      }
    }
  }
}

TEST(Dropout, NonContiguousInput) {
  const Tensor leaf = torch::randn({6, 8}, on_device()).requires_grad_();
  const Tensor x = leaf.t();
  torch::manual_seed(5);
  const Tensor a = torch::dropout(x, 0.4, true);
  torch::manual_seed(5);
  const Tensor b = ops::dropout(x, 0.4, true);
  EXPECT_TRUE(same(a, b));
  EXPECT_EQ(a.strides(), b.strides());
}

TEST(Dropout, SavesOneBytePerElement) {
  const Tensor leaf = torch::randn({64, 64}, on_device()).requires_grad_();
  const auto kept_by = [&](auto&& run) {
    KeptMeter kept;
    const Tensor x = leaf * 1;
    const KeptMeter::Scope scope(kept, 0);
    const Tensor y = run(x);
    return kept.live_bytes();
  };
  const int64_t plain = kept_by(
      [](const Tensor& x) { return ops::fallback::dropout(x, 0.3, true); });
  const int64_t compact =
      kept_by([](const Tensor& x) { return ops::dropout(x, 0.3, true); });
  EXPECT_EQ(compact, allocated_bytes(leaf.numel(), device()));
  EXPECT_EQ(plain, device().is_cpu() ? 4 * compact : compact);
}

TEST(Dropout, MatchesFiniteDifferences) {
  Tensor x = torch::randn({4, 5}, on_device(torch::kDouble));
  const Tensor input = x.clone().requires_grad_();
  const auto value = [](const Tensor& t) {
    torch::manual_seed(3);
    return ops::dropout(t, 0.4, true).square().sum();
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
    return ops::dropout(t * 2, 0.4, true).square();
  };
  torch::manual_seed(8);
  run(x).sum().backward();
  const Tensor expected = testing::take_gradients({x})[0];
  torch::manual_seed(8);
  checkpoint(run, x).sum().backward();
  EXPECT_TRUE(same(expected, x.grad()));
}

TEST(Dropout, Errors) {
  if (!device().is_cpu()) GTEST_SKIP() << "the fallback runs on CUDA";
  const Tensor x = torch::randn({4, 5}, on_device()).requires_grad_();
  const Tensor sum = ops::dropout(x, 0.4, true).sum();
  EXPECT_NE(error_of([&] {
              torch::autograd::grad({sum}, {x}, {}, true, true);
            }).find("[dropout] has no second derivative"),
            std::string::npos);
  EXPECT_NE(error_of([&] { ops::dropout(x, 1.5, true); }).find("between 0 and"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
