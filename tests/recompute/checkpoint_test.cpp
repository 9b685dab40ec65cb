#include "recompute/recompute_context.h"
#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/autograd.h>
#include <torch/nn/modules/dropout.h>

#include <stdexcept>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::on_device;
using testing::same;
using testing::take_gradients;
using torch::Tensor;

/// A function that counts its calls. exp and sin save tensors for backward.
struct Counted {
  int* calls;
  Tensor operator()(const Tensor& x) const {
    ++*calls;
    return x.sin().exp().sin().exp();
  }
};

TEST(Checkpoint, RunsTwiceWithTheSameResult) {
  const auto x = torch::randn({64}, on_device()).requires_grad_();
  int plain = 0;
  const auto expected =
      torch::autograd::grad({Counted{&plain}(x).sum()}, {x})[0];
  int calls = 0;
  const auto y = checkpoint(Counted{&calls}, x);
  EXPECT_EQ(calls, 1);
  const auto got = torch::autograd::grad({y.sum()}, {x})[0];
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(same(got, expected));
}

TEST(Checkpoint, SavesItsInputOnly) {
  constexpr int64_t kBytes = 1 << 20;
  const auto x = torch::randn({kBytes / 4}, on_device()).requires_grad_();
  const auto function = [](const Tensor& t) {
    return t.sin().exp().sin().exp().sum();
  };
  const auto held = [&](auto&& call) {
    const int64_t before = live_bytes(device());
    const auto y = call();
    return live_bytes(device()) - before;
  };
  EXPECT_GE(held([&] { return function(x); }), 2 * kBytes);
  EXPECT_LT(held([&] { return checkpoint(function, x); }), 10000);
}

TEST(Checkpoint, SupportsBatchNormAndDropout) {
  torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::BatchNorm1d(8),
                            torch::nn::ReLU(), torch::nn::Dropout(0.5));
  net->to(device());
  const auto x = torch::randn({16, 8}, on_device());
  const auto run = [&](bool recompute) {
    net->apply([](torch::nn::Module& m) {
      if (auto* norm = m.as<torch::nn::BatchNorm1d>()) {
        norm->reset_running_stats();
      }
    });
    torch::manual_seed(9);
    const auto y = recompute ? checkpoint(net, x) : net->forward(x);
    y.square().sum().backward();
    auto results = take_gradients(net->parameters());
    for (const auto& buffer : net->buffers()) results.push_back(buffer.clone());
    results.push_back(y);
    results.push_back(torch::rand({4}, on_device()));  // position of the RNG
    return results;
  };
  const auto expected = run(false);
  const auto got = run(true);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same(got[i], expected[i])) << i;
  }
}

TEST(Checkpoint, SupportsSeveralInputsAndOutputs) {
  const auto a = torch::randn({5}, on_device()).requires_grad_();
  const auto b = torch::randn({5}, on_device());
  const auto mask = torch::randn({5}, on_device()).gt(0);
  const auto function = [](const Tensor& x, const Tensor& y, const Tensor& m) {
    return std::make_tuple((x * y).exp(), x.sin().masked_fill(m, 0), m);
  };
  const auto [p, q, r] = function(a, b, mask);
  const auto expected = torch::autograd::grad({(p * q).sum()}, {a})[0];
  const auto [s, t, u] = checkpoint(function, a, b, mask);
  EXPECT_FALSE(u.requires_grad());
  EXPECT_TRUE(same(torch::autograd::grad({(s * t).sum()}, {a})[0], expected));
}

TEST(Checkpoint, SupportsListsAndUndefinedInputs) {
  const auto x = torch::randn({5}, on_device()).requires_grad_();
  const auto y = checkpoint_list(
      [](const Tensors& in) {
        EXPECT_FALSE(in[1].defined());
        return Tensors{in[0].exp(), in[0].sin()};
      },
      {x, Tensor()});
  ASSERT_EQ(y.size(), 2u);
  EXPECT_TRUE(same(torch::autograd::grad({y[0].sum()}, {x})[0], x.exp()));
}

TEST(Checkpoint, NestsThreeDeep) {
  int inner = 0, middle = 0, outer = 0;
  const auto f1 = [&inner](const Tensor& t) {
    ++inner;
    return t.sin().exp();
  };
  const auto f2 = [&](const Tensor& t) {
    ++middle;
    return checkpoint(f1, t.cos()).sin();
  };
  const auto f3 = [&](const Tensor& t) {
    ++outer;
    return checkpoint(f2, t.exp()).cos();
  };
  const auto x = torch::rand({32}, on_device()).requires_grad_();
  const auto expected = torch::autograd::grad(
      {x.exp().cos().sin().exp().sin().cos().sum()}, {x})[0];
  const auto y = checkpoint(f3, x).sum();
  EXPECT_EQ(outer + middle + inner, 3);
  EXPECT_TRUE(same(torch::autograd::grad({y}, {x})[0], expected));
  EXPECT_EQ(outer, 2);
  EXPECT_EQ(middle, 3);
  EXPECT_LE(inner, 4);
}

TEST(Checkpoint, NestedSavesOnlyTheOuterInput) {
  constexpr int64_t kBytes = 1 << 20;
  const auto x = torch::randn({kBytes / 4}, on_device()).requires_grad_();
  const int64_t before = live_bytes(device());
  const auto y = checkpoint(
      [](const Tensor& t) {
        const auto body = [](const Tensor& u) { return u.sin().exp(); };
        return checkpoint(body, checkpoint(body, t * 2)).sum();
      },
      x);
  EXPECT_LT(live_bytes(device()) - before, 20000);
  y.backward();
}

TEST(Checkpoint, EarlyStopSkipsTheRest) {
  int tail = 0;
  const auto function = [&tail](const Tensor& t) {
    auto y = t.exp();
    ++tail;
    return y + 1;
  };
  const auto x = torch::randn({4}, on_device()).requires_grad_();
  checkpoint(function, x).sum().backward();
  EXPECT_EQ(tail, 1);
  checkpoint_with({.early_stop = false}, function, x).sum().backward();
  EXPECT_EQ(tail, 3);
}

TEST(Checkpoint, RetainedGraphIsRecomputedAgain) {
  int calls = 0;
  const auto x = torch::randn({4}, on_device()).requires_grad_();
  const auto y = checkpoint(Counted{&calls}, x).sum();
  const auto first = torch::autograd::grad({y}, {x}, {}, true)[0];
  const int64_t between = live_bytes(device());
  const auto second = torch::autograd::grad({y}, {x}, {}, true)[0];
  EXPECT_TRUE(same(first, second));
  EXPECT_EQ(calls, 3);
  EXPECT_LE(live_bytes(device()) - between, 1024);
}

TEST(Checkpoint, APartialBackwardLeavesNothingBehind) {
  constexpr int64_t kBytes = 1 << 20;
  const auto a = torch::randn({kBytes / 4}, on_device()).requires_grad_();
  const auto b = torch::randn({kBytes / 4}, on_device()).requires_grad_();
  const auto y =
      checkpoint([](const Tensor& x,
                    const Tensor& z) { return (x.sin() * z.exp()).sum(); },
                 a, b);
  const int64_t before = live_bytes(device());
  auto gradient = torch::autograd::grad({y}, {a}, {}, true)[0];
  gradient.reset();
  const int64_t after = live_bytes(device());
  EXPECT_LE(after, before);
  if (device().is_cpu()) {
    EXPECT_EQ(after, before);
  }
}

TEST(Checkpoint, SupportsSecondDerivatives) {
  const auto x = torch::rand({6}, on_device(torch::kDouble)).requires_grad_();
  const auto second = [&](const Tensor& y) {
    const auto g =
        torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({g.square().sum()}, {x})[0];
  };
  const auto function = [](const Tensor& t) {
    return (t.sin() * t.exp()).sum();
  };
  EXPECT_LT(testing::relative_error(second(function(x)),
                                    second(checkpoint(function, x))),
            1e-14);
}

TEST(Checkpoint, NoGradModeIsAPlainCall) {
  const torch::NoGradGuard no_grad;
  int calls = 0;
  const auto x = torch::randn({4}, on_device());
  EXPECT_FALSE(checkpoint(Counted{&calls}, x).requires_grad());
  EXPECT_EQ(calls, 1);
}

TEST(Checkpoint, SupportsUnusedOutputs) {
  int calls = 0;
  const auto x = torch::randn({4}, on_device()).requires_grad_();
  const int64_t before = live_bytes(device());
  { const auto y = checkpoint(Counted{&calls}, x); }
  EXPECT_EQ(live_bytes(device()), before);
  EXPECT_EQ(calls, 1);
}

TEST(Checkpoint, RecomputedTensorsCountForTheirStage) {
  constexpr int64_t kBytes = 1 << 20;
  const KeptMeter meter;
  const auto x = torch::randn({kBytes / 4}, on_device()).requires_grad_();
  Tensor y;
  {
    const KeptMeter::Scope scope(meter, 3);
    y = checkpoint(
        [](const Tensor& t) { return t.sin().exp().sin().exp().sum(); }, x);
  }
  EXPECT_EQ(meter.live_bytes(), kBytes);
  y.backward();
  EXPECT_EQ(meter.live_bytes(), 0);
  EXPECT_EQ(meter.peak_bytes(), 3 * kBytes);  // x and two of exp
}

TEST(Checkpoint, RejectsWrongUse) {
  const auto x = torch::randn({4, 4}, on_device()).requires_grad_();
  const int64_t before = live_bytes(device());
  int calls = 0;
  const auto expect = [&](const std::string& part, auto function) {
    calls = 0;
    const auto text =
        error_of([&] { checkpoint(function, x).sum().backward(); });
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_FALSE(is_recomputing());
    EXPECT_EQ(live_bytes(device()), before);
  };
  expect("saved tensor 0 was", [&](const Tensor& t) {
    return ++calls == 1 ? t.exp() : torch::cat({t, t}).exp();
  });
  expect("it saved 0 tensors",
         [&](const Tensor& t) { return ++calls == 1 ? t.exp() : t + 1; });
  expect("input 0 was modified in place", [&](const Tensor& t) {
    const torch::NoGradGuard no_grad;
    t.add_(1);
    const torch::AutoGradMode grad(true);
    return t.exp();
  });
  const auto exp = [](const Tensor& t) { return t.exp(); };
  expect("was modified in place by the function", [&](const Tensor& t) {
    return checkpoint_with(
        {.early_stop = false},
        [&](const Tensor& u) {
          auto y = u * 2;
          auto z = checkpoint(exp, y);
          y.add_(1);
          return z;
        },
        t);
  });
  const auto text = error_of([&] {
    auto y = x * 2;
    auto z = checkpoint(exp, y);
    y.add_(1);
    z.sum().backward();
  });
  EXPECT_NE(text.find("modified by an inplace operation"), std::string::npos);
  EXPECT_NE(error_of([&] {
              checkpoint_list(nullptr, {x});
            }).find("expected a function, got none"),
            std::string::npos);
}

TEST(Checkpoint, DetectsAdditionalTensorsWithoutEarlyStop) {
  const auto x = torch::randn({4}, on_device()).requires_grad_();
  int calls = 0;
  const auto y = checkpoint_with(
      {.early_stop = false},
      [&](const Tensor& t) { return ++calls == 1 ? t.exp() : t.exp().exp(); },
      x);
  EXPECT_NE(error_of([&] { y.sum().backward(); }).find("saved more than the 1"),
            std::string::npos);
}

TEST(Checkpoint, ExceptionsPropagateUnchanged) {
  const auto x = torch::randn({4}, on_device()).requires_grad_();
  const int64_t before = live_bytes(device());
  EXPECT_THROW(checkpoint(
                   [](const Tensor& t) -> Tensor {
                     t.exp();
                     throw std::out_of_range("mine");
                   },
                   x),
               std::out_of_range);
  EXPECT_THROW(checkpoint(
                   [](const Tensor& t) {
                     if (is_recomputing()) throw std::out_of_range("mine");
                     return t.exp();
                   },
                   x)
                   .sum()
                   .backward(),
               std::out_of_range);
  EXPECT_EQ(live_bytes(device()), before);
  int calls = 0;
  checkpoint(Counted{&calls}, x).sum().backward();
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace reprise
