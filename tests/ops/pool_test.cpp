#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/pool.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/autograd.h>

#include <limits>
#include <tuple>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::on_device;
using testing::same;
using torch::Tensor;

Tensor plain(const Tensor& x, const ops::MaxPoolOptions& options, bool relu) {
  return torch::max_pool2d(
      relu ? torch::relu(x) : x, options.kernel,
      options.stride == 0 ? options.kernel : options.stride, options.padding);
}

Tensor compact(const Tensor& x, const ops::MaxPoolOptions& options, bool relu) {
  return relu ? ops::relu_max_pool2d(x, options) : ops::max_pool2d(x, options);
}

/// Compares output and gradient with the fallback and with LibTorch, bit for bit.
void expect_same(const Tensor& values, const ops::MaxPoolOptions& options) {
  for (const bool relu : {false, true}) {
    const Tensor x = values.detach().requires_grad_();
    const Tensor a = plain(x, options, relu);
    const Tensor weights = torch::randn_like(a);
    const Tensor b = compact(x, options, relu);
    EXPECT_TRUE(torch::equal(a.nan_to_num(77),
                             (relu ? ops::fallback::relu_max_pool2d(x, options)
                                   : ops::fallback::max_pool2d(x, options))
                                 .nan_to_num(77)));
    EXPECT_NE(b.grad_fn(), nullptr);
    EXPECT_TRUE(torch::equal(a.nan_to_num(77), b.nan_to_num(77)));
    EXPECT_EQ(a.strides(), b.strides());
    a.backward(weights);
    const Tensor expected = testing::take_gradients({x})[0];
    b.backward(weights);
    EXPECT_TRUE(same(expected, x.grad())) << relu;
    EXPECT_EQ(expected.strides(), x.grad().strides());
    x.mutable_grad().reset();
  }
}

using Shape = std::vector<int64_t>;
const std::pair<Shape, ops::MaxPoolOptions> kCases[] = {
    {{3, 4, 8, 8}, {}},
    {{2, 3, 9, 7}, {.kernel = 2}},  // no window covers the last column
    {{2, 3, 11, 13}, {.kernel = 3, .stride = 2, .padding = 1}},
    {{2, 3, 10, 12}, {.kernel = 3, .stride = 1}},
    {{1, 2, 20, 17}, {.kernel = 16, .stride = 1, .padding = 8}},
    {{2, 2, 6, 5}, {.kernel = 5, .stride = 3, .padding = 2}},
    {{2, 2, 6, 6}, {.kernel = 2, .stride = 5}},
    {{2, 2, 6, 6}, {.kernel = 1}},
};

TEST(Pool, MatchesLibTorchBitForBit) {
  torch::manual_seed(1);
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    for (const auto& [shape, options] : kCases) {
      expect_same(torch::randn(shape, on_device(type)), options);
    }
  }
}

TEST(Pool, TiesSelectTheFirst) {
  torch::manual_seed(2);
  for (const auto& [shape, options] : kCases) {
    expect_same(torch::randint(-1, 2, shape, on_device()), options);
    expect_same(torch::zeros(shape, on_device()), options);
    expect_same(-torch::ones(shape, on_device()), options);
  }
}

TEST(Pool, NanAndInfinity) {
  torch::manual_seed(3);
  for (const double odd : {std::numeric_limits<double>::quiet_NaN(),
                           std::numeric_limits<double>::infinity(),
                           -std::numeric_limits<double>::infinity()}) {
    for (const auto& [shape, options] : kCases) {
      Tensor x = torch::randn(shape, on_device());
      x.masked_fill_(torch::rand(shape, on_device()).lt(0.2), odd);
      expect_same(x, options);
    }
  }
}

TEST(Pool, SeveralChunksOfSamples) {
  // More windows than indices at a time; the last chunk is smaller.
  torch::manual_seed(4);
  expect_same(torch::randn({7, 4, 200, 190}, on_device()), {});
  expect_same(torch::randn({3, 8, 300, 310}, on_device()),
              {.kernel = 3, .stride = 2, .padding = 1});
}

TEST(Pool, OtherMemoryFormats) {
  torch::manual_seed(5);
  for (const auto& [shape, options] : kCases) {
    expect_same(torch::randn(shape, on_device())
                    .contiguous(at::MemoryFormat::ChannelsLast),
                options);
    expect_same(
        torch::randn({shape[0], shape[1], shape[3], shape[2]}, on_device())
            .transpose(2, 3),
        options);
  }
}

// Numbers of channels that the kernels support. Sums of overlapping windows may be rounded
// in another order.
TEST(Pool, ChannelsLastKernels) {
  torch::manual_seed(12);
  const std::tuple<Shape, ops::MaxPoolOptions> cases[] = {
      {{3, 16, 8, 8}, {}},
      {{2, 8, 9, 7}, {}},
      {{1, 64, 30, 34}, {}},
      {{2, 24, 11, 13}, {.kernel = 3, .stride = 2, .padding = 1}},
  };
  for (const auto type : {torch::kFloat, torch::kBFloat16}) {
    for (const auto& [shape, given] : cases) {
      for (const bool compact_only : {false, true}) {
        for (const bool relu : {false, true}) {
          ops::MaxPoolOptions options = given;
          options.compact = compact_only;
          const Tensor x = torch::randn(shape, on_device(type))
                               .contiguous(at::MemoryFormat::ChannelsLast)
                               .requires_grad_();
          const Tensor expected = plain(x, options, relu);
          const Tensor y = compact(x, options, relu);
          EXPECT_TRUE(torch::equal(expected, y));
          EXPECT_EQ(expected.strides(), y.strides());
          const Tensor weights = torch::randn_like(y);
          expected.backward(weights);
          const Tensor gradient = testing::take_gradients({x})[0];
          y.backward(weights);
          EXPECT_LE(testing::relative_error(x.grad(), gradient),
                    type == torch::kFloat ? 1e-6 : 4e-3);
          x.mutable_grad().reset();
        }
      }
    }
  }
}

TEST(Pool, HalfPrecision) {
  torch::manual_seed(6);
  expect_same(torch::randn({2, 3, 8, 8}, on_device(torch::kBFloat16)), {});
}

TEST(Pool, LargeWindowsUseFallback) {
  torch::manual_seed(7);
  expect_same(torch::randn({1, 2, 40, 40}, on_device()), {.kernel = 17});
  // Wider than the input.
  expect_same(torch::randn({1, 2, 9, 4}, on_device()),
              {.kernel = 5, .stride = 1, .padding = 2});
}

TEST(Pool, MatchesFiniteDifferences) {
  torch::manual_seed(8);
  const ops::MaxPoolOptions options{.kernel = 3, .stride = 2, .padding = 1};
  const Tensor x = torch::randn({1, 2, 5, 6}, on_device(torch::kDouble));
  const Tensor weights = torch::randn({1, 2, 3, 3}, on_device(torch::kDouble));
  for (const bool relu : {false, true}) {
    const Tensor input = x.clone().requires_grad_();
    (compact(input, options, relu) * weights).sum().backward();
    const Tensor gradient = input.grad().flatten();
    Tensor flat = x.view({-1});
    constexpr double kStep = 1e-6;
    for (int64_t i = 0; i < flat.numel(); ++i) {
      const auto value = [&] {
        return (compact(x, options, relu) * weights).sum().item<double>();
      };
      const double before = flat[i].item<double>();
      flat[i] = before + kStep;
      const double above = value();
      flat[i] = before - kStep;
      const double below = value();
      flat[i] = before;
      EXPECT_NEAR((above - below) / (2 * kStep), gradient[i].item<double>(),
                  1e-8);
    }
  }
}

TEST(Pool, SavesOneBytePerOutput) {
  // As the output of a convolution: nothing else holds the input.
  const Tensor leaf =
      torch::randn({8, 4, 64, 64}, on_device()).requires_grad_();
  const auto kept_by = [&](auto&& run) {
    KeptMeter kept;
    const Tensor x = leaf * 1;
    const KeptMeter::Scope scope(kept, 0);
    const Tensor y = run(x);
    return kept.live_bytes();
  };
  const int64_t in = leaf.numel(), out = in / 4;
  const auto bytes = [](int64_t wanted) {
    return allocated_bytes(wanted, device());
  };
  EXPECT_EQ(kept_by([](const Tensor& x) { return plain(x, {}, false); }),
            bytes(in * 4) + bytes(out * 8));
  EXPECT_EQ(kept_by([](const Tensor& x) { return ops::max_pool2d(x); }),
            bytes(out));
  EXPECT_EQ(kept_by([](const Tensor& x) { return plain(x, {}, true); }),
            bytes(in * 4) + bytes(out * 8));
  EXPECT_EQ(kept_by([](const Tensor& x) { return ops::relu_max_pool2d(x); }),
            bytes(out) + bytes(out * 4));
}

TEST(Pool, NeverHoldsAllIndices) {
  if (!device().is_cpu()) GTEST_SKIP() << "chunks are larger on a GPU";
  const Tensor leaf =
      torch::randn({16, 8, 128, 128}, on_device()).requires_grad_();
  const Tensor x = leaf * 1;
  const int64_t out = leaf.numel() / 4;
  MemoryMeter meter(device());
  const Tensor y = ops::max_pool2d(x);
  EXPECT_LT(meter.peak_increase_bytes(), out * 4 + out + out * 8 / 2);
  const Tensor weights = torch::ones_like(y);
  meter.restart();
  y.backward(weights);
  // The gradients of x and of the leaf.
  EXPECT_LT(meter.peak_increase_bytes(), 2 * leaf.numel() * 4 + out * 8 / 2);
}

TEST(Pool, NoGradientsAndEmptyBatches) {
  const Tensor x = torch::randn({2, 3, 4, 4}, on_device());
  EXPECT_FALSE(ops::max_pool2d(x).requires_grad());
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(same(ops::relu_max_pool2d(x), plain(x, {}, true)));
  const Tensor none = torch::zeros({0, 3, 4, 4}, on_device());
  EXPECT_EQ(ops::max_pool2d(none).sizes(), (Shape{0, 3, 2, 2}));
}

TEST(Pool, UnderCheckpoint) {
  torch::manual_seed(9);
  const Tensor x = torch::randn({2, 3, 8, 8}, on_device()).requires_grad_();
  const auto run = [](const Tensor& t) { return ops::relu_max_pool2d(t * 2); };
  run(x).square().sum().backward();
  const Tensor expected = testing::take_gradients({x})[0];
  checkpoint(run, x).square().sum().backward();
  EXPECT_TRUE(same(expected, x.grad()));
}

TEST(Pool, Errors) {
  const Tensor x = torch::randn({1, 1, 4, 4}, on_device()).requires_grad_();
  const Tensor sum = ops::max_pool2d(x).sum();
  EXPECT_NE(error_of([&] {
              torch::autograd::grad({sum}, {x}, {}, true, true);
            }).find("[max_pool2d] has no second derivative"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              ops::max_pool2d(x[0]);
            }).find("expected (N, C, H, W), got [1, 4, 4]"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              ops::max_pool2d(x, {.kernel = 0});
            }).find("kernel and a stride of at least 1"),
            std::string::npos);
  // Raised by LibTorch.
  EXPECT_NE(error_of([&] {
              ops::max_pool2d(x, {.kernel = 2, .padding = 2});
            }).find("pad should be"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
