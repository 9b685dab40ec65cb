#include "compat/autocast.h"
#include "half_gemm_error.h"
#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/loss.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/autograd.h>
#include <torch/nn/functional/loss.h>

#include <cmath>

namespace reprise {
namespace {

using ops::WeightGradientOrder;
using testing::device;
using testing::error_of;
using testing::on_device;
using testing::relative_error;
using testing::same;
using testing::same_in_parts;
using torch::Tensor;
namespace F = torch::nn::functional;

struct HeadCase {
  Tensor hidden, weight, bias, targets;
};

HeadCase make_case(int64_t rows, int64_t width, int64_t columns, bool bias,
                   torch::ScalarType type = torch::kFloat) {
  torch::manual_seed(3);
  HeadCase c;
  const auto options = on_device(type);
  c.hidden = torch::randn({rows, width}, options).requires_grad_();
  c.weight = torch::randn({columns, width}, options).mul_(0.3).requires_grad_();
  if (bias) c.bias = torch::randn({columns}, options).requires_grad_();
  c.targets = torch::randint(columns, {rows}, on_device(torch::kLong));
  if (rows > 3) c.targets.slice(0, 1, rows, 3).fill_(-100);
  return c;
}

struct HeadOutcome {
  Tensor loss, correct, hidden, weight, bias;
};

/// With LibTorch. The loss is divided, so that its gradient is not 1.
HeadOutcome plain(const HeadCase& c,
                  torch::ScalarType loss_type = torch::kFloat) {
  const Tensor scores = c.bias.defined()
                            ? torch::addmm(c.bias, c.hidden, c.weight.t())
                            : torch::mm(c.hidden, c.weight.t());
  const Tensor loss =
      F::cross_entropy(scores.to(loss_type), c.targets,
                       F::CrossEntropyFuncOptions().reduction(torch::kSum));
  (loss / 7).backward();
  auto gradients = testing::take_gradients(
      c.bias.defined() ? Tensors{c.hidden, c.weight, c.bias}
                       : Tensors{c.hidden, c.weight});
  gradients.resize(3);
  return {loss.detach(), scores.argmax(1).eq(c.targets).sum(), gradients[0],
          gradients[1], gradients[2]};
}

HeadOutcome chunked(const HeadCase& c, ops::LinearCrossEntropyOptions options) {
  options.count_correct = true;
  const auto [loss, correct] =
      ops::linear_cross_entropy(c.hidden, c.weight, c.bias, c.targets, options);
  (loss / 7).backward();
  auto gradients = testing::take_gradients(
      c.bias.defined() ? Tensors{c.hidden, c.weight, c.bias}
                       : Tensors{c.hidden, c.weight});
  gradients.resize(3);
  return {loss.detach(), correct, gradients[0], gradients[1], gradients[2]};
}

ops::LinearCrossEntropyOptions with(
    int64_t chunk_scores, std::optional<WeightGradientOrder> how = {}) {
  ops::LinearCrossEntropyOptions options;
  options.chunk_scores = chunk_scores;
  options.weight_gradient = how;
  return options;
}

void expect_near(const HeadOutcome& a, const HeadOutcome& b, double tolerance) {
  EXPECT_LE(relative_error(a.loss, b.loss), tolerance);
  EXPECT_LE(relative_error(a.hidden, b.hidden), tolerance);
  EXPECT_LE(relative_error(a.weight, b.weight), tolerance);
  ASSERT_EQ(a.bias.defined(), b.bias.defined());
  if (a.bias.defined()) {
    EXPECT_LE(relative_error(a.bias, b.bias), tolerance);
  }
  EXPECT_TRUE(torch::equal(a.correct, b.correct));
}

constexpr WeightGradientOrder kBoth[] = {WeightGradientOrder::kByColumns,
                                         WeightGradientOrder::kByRows};

TEST(Loss, OneChunkMatchesLibTorchBitForBit) {
  const HeadCase c = make_case(30, 16, 50, /*bias=*/false);
  const HeadOutcome a = plain(c);
  for (const auto how : kBoth) {
    const HeadOutcome b = chunked(c, with(1 << 20, how));
    EXPECT_TRUE(same(a.loss, b.loss));
    EXPECT_TRUE(same(a.hidden, b.hidden));
    EXPECT_TRUE(same(a.weight, b.weight));
    EXPECT_TRUE(torch::equal(a.correct, b.correct));
  }
}

TEST(Loss, FallbackMatchesLibTorchBitForBit) {
  for (const bool bias : {false, true}) {
    const HeadCase c = make_case(30, 16, 50, bias);
    const HeadOutcome a = plain(c);
    ops::LinearCrossEntropyOptions options;
    options.count_correct = true;
    const auto [loss, correct] = ops::fallback::linear_cross_entropy(
        c.hidden, c.weight, c.bias, c.targets, options);
    (loss / 7).backward();
    EXPECT_TRUE(same(a.loss, loss.detach()));
    EXPECT_TRUE(torch::equal(a.correct, correct));
    EXPECT_TRUE(same(a.hidden, c.hidden.grad()));
    EXPECT_TRUE(same(a.weight, c.weight.grad()));
  }
}

TEST(Loss, LargeChunksMatchLibTorchBitForBit) {
  // Many chunks, none so small that OpenBLAS selects another kernel.
  const HeadCase c = make_case(900, 64, 5003, /*bias=*/false);
  const HeadOutcome a = plain(c);
  const HeadOutcome b =
      chunked(c, with(128 * 5003, WeightGradientOrder::kByColumns));
  EXPECT_TRUE(same_in_parts(a.loss, b.loss));
  EXPECT_TRUE(same_in_parts(a.hidden, b.hidden));
  EXPECT_TRUE(same_in_parts(a.weight, b.weight));
  EXPECT_TRUE(torch::equal(a.correct, b.correct));
}

TEST(Loss, UnevenChunksInFloat32) {
  for (const bool bias : {false, true}) {
    const HeadCase c = make_case(53, 24, 101, bias);
    const HeadOutcome a = plain(c);
    for (const auto how : kBoth) {
      for (const int64_t scores : {1, 101, 7 * 101, 20 * 101 + 5}) {
        expect_near(a, chunked(c, with(scores, how)), 1e-6);
      }
    }
  }
}

TEST(Loss, UnevenChunksInFloat64) {
  for (const bool bias : {false, true}) {
    const HeadCase c = make_case(53, 24, 101, bias, torch::kDouble);
    const HeadOutcome a = plain(c, torch::kDouble);
    for (const auto how : kBoth) {
      const HeadOutcome b = chunked(c, with(7 * 101, how));
      EXPECT_EQ(b.loss.scalar_type(), torch::kDouble);
      expect_near(a, b, 1e-12);
    }
    // A float32 loss of a float64 model.
    auto options = with(7 * 101);
    options.loss_type = torch::kFloat;
    const HeadOutcome single = chunked(c, options);
    EXPECT_EQ(single.loss.scalar_type(), torch::kFloat);
    EXPECT_EQ(single.weight.scalar_type(), torch::kDouble);
    expect_near(plain(c), single, 1e-6);
  }
}

TEST(Loss, MatchesFiniteDifferences) {
  const HeadCase c = make_case(6, 4, 9, /*bias=*/true, torch::kDouble);
  const auto options = with(2 * 9);
  const auto loss = [&] {
    const torch::NoGradGuard no_grad;
    return ops::linear_cross_entropy(c.hidden, c.weight, c.bias, c.targets,
                                     options)
        .loss.item<double>();
  };
  const HeadOutcome got = chunked(c, options);
  const std::pair<Tensor, Tensor> pairs[] = {
      {c.hidden, got.hidden}, {c.weight, got.weight}, {c.bias, got.bias}};
  for (const auto& [variable, gradient] : pairs) {
    Tensor flat = variable.detach().view({-1});
    const Tensor expected = gradient.flatten();
    constexpr double kStep = 1e-6;
    for (int64_t i = 0; i < flat.numel(); ++i) {
      const double before = flat[i].item<double>();
      flat[i] = before + kStep;
      const double above = loss();
      flat[i] = before - kStep;
      const double below = loss();
      flat[i] = before;
      EXPECT_NEAR((above - below) / (2 * kStep) / 7, expected[i].item<double>(),
                  1e-8);
    }
  }
}

TEST(Loss, AutocastToBFloat16) {
  compat::AutocastState state;
  state.cpu_enabled = state.cuda_enabled = true;
  state.cuda_dtype = torch::kBFloat16;
  for (const bool bias : {false, true}) {
    // A vocabulary of 101, padded to 128.
    const HeadCase c = make_case(70, 32, 101, bias);
    HeadOutcome a;
    {
      const compat::AutocastGuard autocast(state);
      a = plain(c);
    }
    const HeadOutcome exact = plain(c);
    for (const auto how : kBoth) {
      HeadOutcome b;
      {
        const compat::AutocastGuard autocast(state);
        b = chunked(c, with(20 * 101, how));
      }
      EXPECT_EQ(b.loss.scalar_type(), torch::kFloat);
      EXPECT_EQ(b.hidden.scalar_type(), torch::kFloat);
      EXPECT_EQ(b.weight.scalar_type(), torch::kFloat);
      // Matrix products are rounded as those of LibTorch: the result is much closer to them
      // than to float32.
      EXPECT_LE(relative_error(a.loss, b.loss), 1e-6);
      EXPECT_GT(relative_error(exact.loss, b.loss), 1e-6);
      if (how == WeightGradientOrder::kByColumns) {
        EXPECT_LE(relative_error(a.hidden, b.hidden), 3e-3);
        EXPECT_LE(relative_error(a.weight, b.weight), 3e-3);
      }
      // By rows gradients are rounded at other points, but not more often.
      EXPECT_LE(relative_error(exact.hidden, b.hidden),
                1.1 * relative_error(exact.hidden, a.hidden));
      EXPECT_LE(relative_error(exact.weight, b.weight),
                1.5 * relative_error(exact.weight, a.weight));
    }
  }
}

TEST(Loss, HalfPrecisionWeightsAccumulateInFloat32) {
  const HeadCase c = make_case(256, 16, 10, /*bias=*/true, torch::kBFloat16);
  const HeadOutcome a = plain(c);
  // One row per chunk: sums in half precision would have an error of a percent.
  const HeadOutcome b = chunked(c, with(10, WeightGradientOrder::kByRows));
  EXPECT_EQ(b.weight.scalar_type(), torch::kBFloat16);
  // Includes the error of the reference.
  EXPECT_LE(
      relative_error(a.weight.to(torch::kFloat), b.weight.to(torch::kFloat)),
      std::max(4e-3, 1.5 * testing::half_gemm_error(256)));
  EXPECT_LE(relative_error(a.bias.to(torch::kFloat), b.bias.to(torch::kFloat)),
            4e-3);
}

TEST(Loss, BackwardOutsideOfAutocastUsesTypeOfForward) {
  compat::AutocastState state;
  state.cpu_enabled = state.cuda_enabled = true;
  state.cuda_dtype = torch::kBFloat16;
  const HeadCase c = make_case(20, 16, 33, false);
  Tensor inside, outside;
  {
    const compat::AutocastGuard autocast(state);
    inside = chunked(c, with(200)).weight;
    const Tensor loss =
        ops::linear_cross_entropy(c.hidden, c.weight, {}, c.targets, with(200))
            .loss;
    const compat::AutocastGuard none(compat::AutocastState{});
    (loss / 7).backward();
    outside = testing::take_gradients({c.weight})[0];
  }
  EXPECT_TRUE(same(inside, outside));
}

TEST(Loss, HalfPrecisionInOneChunk) {
  // A number of classes that is not a multiple of 128 and exceeds what a block of threads
  // processes at once.
  const HeadCase c = make_case(70, 64, 5003, /*bias=*/false, torch::kBFloat16);
  const HeadCase exact{c.hidden.detach().to(torch::kDouble).requires_grad_(),
                       c.weight.detach().to(torch::kDouble).requires_grad_(),
                       {},
                       c.targets};
  const HeadOutcome a = plain(exact, torch::kDouble);
  const double rounding = std::max(1e-2, 2 * testing::half_gemm_error(5003));
  const auto expect_right = [&](const HeadOutcome& b) {
    EXPECT_LE(relative_error(a.loss, b.loss.to(torch::kDouble)), 2e-3);
    EXPECT_LE(relative_error(a.hidden, b.hidden.to(torch::kDouble)), rounding);
    EXPECT_LE(relative_error(a.weight, b.weight.to(torch::kDouble)), 1e-2);
  };
  const auto rows = WeightGradientOrder::kByRows;
  const HeadOutcome whole = chunked(c, with(0, rows));
  expect_right(whole);
  const HeadOutcome parts = chunked(c, with(8 * 5003, rows));
  expect_right(parts);
  EXPECT_TRUE(torch::equal(whole.correct, parts.correct));
  // A second backward of the same graph gives the same gradients.
  const Tensor loss = ops::linear_cross_entropy(c.hidden, c.weight, {},
                                                c.targets, with(0, rows))
                          .loss;
  (loss / 7).backward({}, /*retain_graph=*/true);
  const auto first = testing::take_gradients({c.hidden, c.weight});
  (loss / 7).backward();
  const auto second = testing::take_gradients({c.hidden, c.weight});
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(same(first[i], second[i]));
    EXPECT_TRUE(same(first[i], i == 0 ? whole.hidden : whole.weight));
  }
}

TEST(Loss, AllIgnoredAndEmpty) {
  HeadCase c = make_case(8, 4, 5, true);
  c.targets.fill_(-100);
  for (const auto how : kBoth) {
    const HeadOutcome ignored = chunked(c, with(10, how));
    EXPECT_EQ(ignored.loss.item<float>(), 0);
    EXPECT_EQ(ignored.correct.item<int64_t>(), 0);
    EXPECT_EQ(ignored.hidden.abs().sum().item<float>(), 0);
    EXPECT_EQ(ignored.weight.abs().sum().item<float>(), 0);
    const HeadOutcome empty = chunked(make_case(0, 4, 5, true), with(10, how));
    EXPECT_EQ(empty.loss.item<float>(), 0);
    EXPECT_EQ(empty.hidden.sizes(), (std::vector<int64_t>{0, 4}));
    EXPECT_EQ(empty.weight.abs().sum().item<float>(), 0);
  }
}

TEST(Loss, OtherIgnoreIndex) {
  HeadCase c = make_case(12, 4, 5, false);
  const HeadOutcome a = chunked(c, with(10));
  c.targets.masked_fill_(c.targets.eq(-100), 4321);
  auto options = with(10);
  options.ignore_index = 4321;
  const HeadOutcome b = chunked(c, options);
  EXPECT_TRUE(same(a.loss, b.loss));
  EXPECT_TRUE(same(a.weight, b.weight));
}

TEST(Loss, SkipsUnneededGradients) {
  for (const auto how : kBoth) {
    HeadCase c = make_case(12, 4, 5, true);
    const HeadOutcome a = chunked(c, with(10, how));
    c.weight = c.weight.detach();
    auto loss = ops::linear_cross_entropy(c.hidden, c.weight, c.bias, c.targets,
                                          with(10, how))
                    .loss;
    (loss / 7).backward();
    EXPECT_TRUE(same(a.hidden, c.hidden.grad()));
    EXPECT_TRUE(same(a.bias, c.bias.grad()));
    c.hidden = c.hidden.detach();
    c.bias = c.bias.detach();
    loss = ops::linear_cross_entropy(c.hidden, c.weight, c.bias, c.targets,
                                     with(10, how))
               .loss;
    EXPECT_FALSE(loss.requires_grad());
    c.weight.requires_grad_();
    loss = ops::linear_cross_entropy(c.hidden, c.weight, c.bias, c.targets,
                                     with(10, how))
               .loss;
    (loss / 7).backward();
    EXPECT_TRUE(same(a.weight, c.weight.grad()));
  }
}

TEST(Loss, TiedWeightAccumulatesBothGradients) {
  // As in GPT-2: an embedding has the same weight.
  const HeadCase c = make_case(20, 8, 30, false, torch::kDouble);
  const Tensor tokens = torch::randint(30, {20}, on_device(torch::kLong));
  const auto gradient = [&](bool chunks) {
    const Tensor x = torch::embedding(c.weight, tokens);
    const Tensor loss =
        chunks ? ops::linear_cross_entropy(x, c.weight, {}, c.targets, with(90))
                     .loss
               : F::cross_entropy(
                     torch::mm(x, c.weight.t()), c.targets,
                     F::CrossEntropyFuncOptions().reduction(torch::kSum));
    loss.backward();
    return testing::take_gradients({c.weight})[0];
  };
  EXPECT_LE(relative_error(gradient(false), gradient(true)), 1e-12);
}

TEST(Loss, SavesNothingAndNeverHoldsAllScores) {
  const int64_t rows = 512, columns = 4096, chunk = 32 * columns;
  const HeadCase c = make_case(rows, 16, columns, false);
  const int64_t whole = rows * columns * 4;
  const Tensor state[] = {c.hidden, c.weight, c.targets};
  const auto measure = [&](auto&& run) {
    KeptMeter kept(state);
    run();  // memory that libraries allocate at first use
    MemoryMeter meter(device());
    Tensor loss;
    {
      const KeptMeter::Scope scope(kept, 0);
      loss = run();
    }
    const int64_t held = kept.live_bytes();
    loss.backward();
    testing::take_gradients({c.hidden, c.weight});
    return std::pair(held, meter.peak_increase_bytes());
  };
  const auto plainly = measure([&] {
    return F::cross_entropy(
        torch::mm(c.hidden, c.weight.t()), c.targets,
        F::CrossEntropyFuncOptions().reduction(torch::kSum));
  });
  EXPECT_GE(plainly.first, whole);
  EXPECT_GE(plainly.second, 3 * whole);
  const int64_t gradients = (rows + columns) * 16 * 4;
  for (const auto how : kBoth) {
    const auto chunks = measure([&] {
      return ops::linear_cross_entropy(c.hidden, c.weight, {}, c.targets,
                                       with(chunk, how))
          .loss;
    });
    EXPECT_EQ(chunks.first, 0);
    EXPECT_LE(chunks.second, gradients + 3 * chunk * 4 + rows * 64);
    EXPECT_LT(chunks.second, whole / 3);
  }
}

TEST(Loss, UnderCheckpoint) {
  const HeadCase c = make_case(40, 8, 30, false);
  const HeadOutcome a = chunked(c, with(90));
  const auto run = [&](const Tensor& x) {
    return ops::linear_cross_entropy(x * 1, c.weight, {}, c.targets, with(90))
        .loss;
  };
  (checkpoint(run, c.hidden) / 7).backward();
  EXPECT_TRUE(same(a.hidden, c.hidden.grad()));
  EXPECT_TRUE(same(a.weight, c.weight.grad()));
}

TEST(Loss, NoSecondDerivative) {
  const HeadCase c = make_case(4, 4, 5, false);
  const auto loss =
      ops::linear_cross_entropy(c.hidden, c.weight, {}, c.targets).loss;
  const auto error = error_of([&] {
    torch::autograd::grad({loss}, {c.hidden}, {}, true, /*create_graph=*/true);
  });
  EXPECT_NE(error.find("[linear_cross_entropy] has no second derivative"),
            std::string::npos)
      << error;
}

TEST(Loss, RejectsMismatchedArguments) {
  const HeadCase c = make_case(4, 4, 5, true);
  const auto refused = [](const Tensor& hidden, const Tensor& weight,
                          const Tensor& bias, const Tensor& targets,
                          int64_t scores = 10) {
    return error_of([&] {
      ops::linear_cross_entropy(hidden, weight, bias, targets, with(scores));
    });
  };
  EXPECT_NE(
      refused(c.hidden.unsqueeze(0), c.weight, {}, c.targets)
          .find("expected hidden (N, D) and weight (V, D), got [1, 4, 4]"),
      std::string::npos);
  EXPECT_NE(refused(c.hidden, c.weight, c.bias.narrow(0, 0, 3), c.targets)
                .find("expected a bias of 5 values, got [3]"),
            std::string::npos);
  EXPECT_NE(refused(c.hidden, c.weight, {}, c.targets.to(torch::kInt))
                .find("expected 4 targets of type int64"),
            std::string::npos);
  EXPECT_NE(refused(c.hidden, c.weight, {}, c.targets, -1)
                .find("chunk_scores of at least 1, or 0, got -1"),
            std::string::npos);
  if (!device().is_cpu()) return;  // on CUDA a wrong index ends the process
  for (const int64_t wrong : {5, -1}) {
    EXPECT_NE(
        refused(c.hidden, c.weight, {}, torch::full_like(c.targets, wrong))
            .find("out of bounds"),
        std::string::npos);
  }
}

}  // namespace
}  // namespace reprise
