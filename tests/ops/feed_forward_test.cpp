#include "compat/autocast.h"
#include "linear_layer.h"
#include "ops/kernels.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/linear.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/recompute/checkpoint.h>

#include <cmath>
#include <functional>

namespace reprise {
namespace {

using ops::Activation;
using ops::FeedForwardLayers;
using testing::device;
using testing::half;
using testing::on_device;
using testing::relative_error;
using testing::same;
using testing::take_gradients;
using torch::Tensor;

constexpr Activation kActivations[] = {Activation::kGelu, Activation::kGeluTanh,
                                       Activation::kRelu, Activation::kSilu};

struct FeedForwardCase {
  Tensor x;
  FeedForwardLayers layers;

  /// x and the parameters.
  Tensors leaves() const {
    Tensors found = {x};
    for (const Tensor& parameter : parameters()) found.push_back(parameter);
    return found;
  }
  Tensors parameters() const {
    Tensors found;
    for (const Tensor& parameter :
         {layers.weight1, layers.bias1, layers.weight2, layers.bias2}) {
      if (parameter.defined()) found.push_back(parameter);
    }
    return found;
  }
};

struct FeedForwardShape {
  std::vector<int64_t> rows = {3, 7};
  int64_t in = 24, hidden = 64, out = 40;
  bool bias = true;
  ops::WeightLayout layout = ops::WeightLayout::kOutIn;
};

FeedForwardCase make_case(const FeedForwardShape& shape,
                          torch::ScalarType type = torch::kFloat) {
  torch::manual_seed(11);
  const auto random = [&](std::vector<int64_t> sizes, double scale) {
    return torch::randn(sizes, on_device(torch::kFloat))
        .mul_(scale)
        .to(torch::kBFloat16)  // the copies are exact
        .to(type)
        .requires_grad_();
  };
  const auto weight = [&](int64_t from, int64_t to) {
    return shape.layout == ops::WeightLayout::kOutIn ? random({to, from}, 0.3)
                                                     : random({from, to}, 0.3);
  };
  FeedForwardCase made;
  auto sizes = shape.rows;
  sizes.push_back(shape.in);
  made.x = random(sizes, 1);
  made.layers.layout = shape.layout;
  made.layers.weight1 = weight(shape.in, shape.hidden);
  made.layers.weight2 = weight(shape.hidden, shape.out);
  if (shape.bias) {
    made.layers.bias1 = random({shape.hidden}, 1);
    made.layers.bias2 = random({shape.out}, 1);
  }
  return made;
}

using FeedForwardFunction = std::function<Tensor(const Tensor& x)>;

/// Output of the last and gradients of two micro-batches.
Tensors run_case(const FeedForwardCase& given, const FeedForwardFunction& f,
                 bool autocast) {
  Tensor y;
  for (int i = 0; i < 2; ++i) {
    {
      const compat::AutocastGuard guard(autocast ? half()
                                                 : compat::AutocastState{});
      y = f(given.x * (1 + i));
    }
    const auto type = given.x.scalar_type() == torch::kDouble ? torch::kDouble
                                                              : torch::kFloat;
    // Exact in half precision, and different in each row.
    const Tensor slope =
        torch::arange(y.numel(), y.options().dtype(type)).fmod(7).sub(2);
    (y.to(type) * slope.view_as(y)).sum().backward();
  }
  Tensors results = take_gradients(given.leaves());
  results.push_back(y.detach());
  return results;
}

/// The same in float64, with LibTorch's operators only.
Tensors exact_results(const FeedForwardShape& shape, Activation activation) {
  const FeedForwardCase given = make_case(shape, torch::kDouble);
  const auto& [w1, b1, w2, b2, layout] = given.layers;
  const bool in_out = layout == ops::WeightLayout::kInOut;
  const auto apply = [&, w1 = w1, b1 = b1, w2 = w2, b2 = b2](const Tensor& x) {
    const Tensor up = torch::linear(x, in_out ? w1.t() : w1, b1);
    Tensor hidden;
    switch (activation) {
      case Activation::kGelu:
        hidden = up * 0.5 * (1 + torch::erf(up * std::sqrt(0.5)));
        break;
      case Activation::kGeluTanh:
        hidden = up * 0.5 *
                 (1 + torch::tanh(std::sqrt(2 / M_PI) *
                                  (up + 0.044715 * up * up * up)));
        break;
      case Activation::kRelu:
        hidden = up.clamp_min(0);
        break;
      case Activation::kSilu:
        hidden = up / (1 + torch::exp(-up));
        break;
    }
    return torch::linear(hidden, in_out ? w2.t() : w2, b2);
  };
  return run_case(given, apply, /*autocast=*/false);
}

FeedForwardFunction fused(const FeedForwardCase& given, Activation activation,
                          bool recompute = false) {
  return [layers = given.layers, activation, recompute](const Tensor& x) {
    return ops::feed_forward(x, layers, activation, recompute);
  };
}

std::vector<FeedForwardShape> shapes() {
  std::vector<FeedForwardShape> made(5);
  made[1].layout = ops::WeightLayout::kInOut;
  made[2].bias = false;
  made[3].hidden = 36;  // not supported by the kernels
  made[4].rows = {531};
  made[4].hidden = 264;
  return made;
}

TEST(FeedForward, WithCopiesMatchesDoublePrecision) {
  for (const FeedForwardShape& shape : shapes()) {
    for (const Activation activation : kActivations) {
      const FeedForwardCase given = make_case(shape);
      const Tensors exact = exact_results(shape, activation);
      const Tensors autocast = run_case(
          given,
          [&](const Tensor& x) {
            return ops::fallback::feed_forward(x, given.layers, activation);
          },
          true);
      const WeightCopies copies(given.parameters(), torch::kBFloat16);
      const Tensors got = run_case(given, fused(given, activation), true);
      ASSERT_EQ(got.size(), exact.size());
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_TRUE(got[i].defined()) << i;
        EXPECT_EQ(got[i].sizes(), exact[i].sizes());
        const double error =
            relative_error(got[i].to(torch::kDouble), exact[i]);
        const double usual =
            relative_error(autocast[i].to(torch::kDouble), exact[i]);
        EXPECT_LT(error, 1.2 * usual + 1e-4)
            << "activation " << static_cast<int>(activation) << ", tensor "
            << i;
        EXPECT_LT(error, 0.05);
      }
    }
  }
}

TEST(FeedForward, WithoutCopiesIsTheSequenceOfOperators) {
  for (const bool autocast : {false, true}) {
    for (const Activation activation : kActivations) {
      const FeedForwardCase given = make_case({});
      const auto& layers = given.layers;
      const Tensors wanted = run_case(
          given,
          [&](const Tensor& x) {
            const Tensor up = torch::linear(x, layers.weight1, layers.bias1);
            const Tensor hidden =
                activation == Activation::kGelu       ? torch::gelu(up)
                : activation == Activation::kGeluTanh ? torch::gelu(up, "tanh")
                : activation == Activation::kRelu     ? torch::relu(up)
                                                      : torch::silu(up);
            return torch::linear(hidden, layers.weight2, layers.bias2);
          },
          autocast);
      const Tensors got = run_case(given, fused(given, activation), autocast);
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(same(got[i], wanted[i])) << i;
      }
    }
  }
}

TEST(FeedForward, RecomputedActivationGivesTheSameBits) {
  for (const FeedForwardShape& shape : shapes()) {
    for (const Activation activation : kActivations) {
      const FeedForwardCase given = make_case(shape);
      const WeightCopies copies(given.parameters(), torch::kBFloat16);
      const Tensors wanted = run_case(given, fused(given, activation), true);
      const Tensors got = run_case(given, fused(given, activation, true), true);
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(same(got[i], wanted[i])) << i;
      }
    }
  }
}

TEST(FeedForward, Float16) {
  if (!device().is_cuda()) GTEST_SKIP() << "float16 is for CUDA";
  auto autocast = half();
  autocast.cuda_dtype = torch::kHalf;
  const FeedForwardShape shape;
  for (const Activation activation : kActivations) {
    const FeedForwardCase given = make_case(shape);
    const Tensors exact = exact_results(shape, activation);
    const WeightCopies copies(given.parameters(), torch::kHalf);
    const Tensors got = run_case(
        given,
        [&](const Tensor& x) {
          const compat::AutocastGuard guard(autocast);
          EXPECT_EQ(ops::has_fused_feed_forward(x, given.layers),
                    detail::kernels_available(device()));
          return ops::feed_forward(x, given.layers, activation);
        },
        false);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_LT(relative_error(got[i].to(torch::kDouble), exact[i]), 4e-3) << i;
    }
  }
}

TEST(FeedForward, SavesInputAndBothHiddenTensors) {
  const FeedForwardCase given = make_case({});
  const WeightCopies copies(given.parameters(), torch::kBFloat16);
  const auto kept_bytes = [&](bool recompute) {
    KeptMeter kept(given.parameters());
    Tensor y;
    const KeptMeter::Scope scope(kept, 0);
    const compat::AutocastGuard guard(half());
    y = ops::feed_forward(given.x, given.layers, Activation::kGelu, recompute);
    return kept.live_bytes();
  };
  const auto x = allocated_bytes(3 * 7 * 24 * 2, device());
  const auto hidden = allocated_bytes(3 * 7 * 64 * 2, device());
  EXPECT_EQ(kept_bytes(false), x + 2 * hidden);
  const bool fuses = detail::kernels_available(device());
  EXPECT_EQ(kept_bytes(true), x + (fuses ? 1 : 2) * hidden);
}

TEST(FeedForward, FusedOnlyWithCopiesOfAllLayers) {
  const FeedForwardCase given = make_case({});
  const bool here = detail::kernels_available(device());
  const auto fuses = [&](const FeedForwardLayers& layers) {
    const compat::AutocastGuard guard(half());
    return ops::has_fused_feed_forward(given.x, layers);
  };
  EXPECT_FALSE(fuses(given.layers));
  {
    const WeightCopies copies(given.parameters(), torch::kBFloat16);
    EXPECT_EQ(fuses(given.layers), here);
    EXPECT_FALSE(ops::has_fused_feed_forward(given.x, given.layers));
    EXPECT_FALSE(fuses({}));
    FeedForwardLayers without = given.layers;
    without.bias1 = without.bias2 = Tensor();
    EXPECT_EQ(fuses(without), here);
  }
  {
    WeightCopiesOptions each;
    each.convert_per_use = true;
    const WeightCopies copies(given.parameters(), torch::kBFloat16, each);
    EXPECT_EQ(fuses(given.layers), here);
  }
  const WeightCopies some({given.layers.weight1, given.layers.weight2},
                          torch::kBFloat16);
  EXPECT_FALSE(fuses(given.layers));
  EXPECT_TRUE(
      run_case(given, fused(given, Activation::kGelu), true)[2].defined());
}

TEST(FeedForward, FrozenParameters) {
  for (size_t frozen = 0; frozen < 5; ++frozen) {
    const FeedForwardCase given = make_case({});
    if (frozen > 0) given.leaves()[frozen].set_requires_grad(false);
    if (frozen == 0) Tensor(given.x).set_requires_grad(false);
    const Tensors wanted =
        run_case(given, fused(given, Activation::kGeluTanh), true);
    const WeightCopies copies(given.parameters(), torch::kBFloat16);
    const Tensors got =
        run_case(given, fused(given, Activation::kGeluTanh), true);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i].defined(), i != frozen) << frozen << " " << i;
      if (i == frozen) continue;
      EXPECT_LT(relative_error(got[i], wanted[i]), 2e-2) << i;
    }
  }
}

TEST(FeedForward, AddsResidual) {
  FeedForwardShape large;  // enough for a product that adds by itself
  large.rows = {2, 512};
  large.in = large.out = 384;
  large.hidden = 768;
  for (const auto& shape : {FeedForwardShape{.in = 40}, large}) {
    const FeedForwardCase given = make_case(shape);
    const Tensor residual = torch::randn_like(given.x).requires_grad_();
    for (const bool recompute : {false, true}) {
      const auto run = [&](bool inside) {
        return run_case(
            given,
            [&](const Tensor& x) {
              const Tensor up = ops::feed_forward_up(x, given.layers);
              const auto activation = Activation::kGeluTanh;
              if (!inside) {
                return residual + ops::feed_forward_down(up, given.layers,
                                                         activation, recompute);
              }
              return ops::feed_forward_down(up, given.layers, activation,
                                            recompute, residual);
            },
            true);
      };
      const WeightCopies copies(given.parameters(), torch::kBFloat16);
      const Tensors wanted = run(false);
      const Tensor gradient = take_gradients({residual})[0];
      const Tensors got = run(true);
      for (size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_LT(relative_error(got[i], wanted[i]), 1e-2) << i;
      }
      EXPECT_LT(relative_error(take_gradients({residual})[0], gradient), 1e-2);
    }
  }
}

TEST(FeedForward, CheckpointsAndConversionPerUse) {
  const FeedForwardCase given = make_case({});
  const auto norm = [](const Tensor& x) { return x.tanh(); };
  const auto run = [&](bool again) {
    return run_case(
        given,
        [&](const Tensor& x) {
          const auto up = [&](const Tensor& t) {
            return ops::feed_forward_up(norm(t), given.layers);
          };
          return ops::feed_forward_down(again ? checkpoint(up, x) : up(x),
                                        given.layers, Activation::kGelu, again);
        },
        true);
  };
  Tensors wanted;
  {
    const WeightCopies copies(given.parameters(), torch::kBFloat16);
    wanted = run(false);
    const Tensors got = run(true);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(same(got[i], wanted[i])) << i;
    }
  }
  WeightCopiesOptions each;
  each.convert_per_use = true;
  const WeightCopies copies(given.parameters(), torch::kBFloat16, each);
  const Tensors got = run(true);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(same(got[i], wanted[i])) << i;
  }
}

}  // namespace
}  // namespace reprise
