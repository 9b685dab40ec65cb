#include "compat/autocast.h"
#include "half_product.h"
#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/linear.h>
#include <reprise/ops/linear_cross_entropy.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/recompute/checkpoint.h>

#include <memory>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::on_device;
using testing::relative_error;
using testing::same;
using testing::take_gradients;
using torch::Tensor;

compat::AutocastState half() {
  compat::AutocastState state;
  (device().is_cuda() ? state.cuda_enabled : state.cpu_enabled) = true;
  state.cuda_dtype = state.cpu_dtype = torch::kBFloat16;
  return state;
}

struct Layer {
  Tensor x, weight, bias;
  WeightLayout layout;
};

Layer make_layer(WeightLayout layout, bool bias = true) {
  torch::manual_seed(5);
  const auto options = on_device(torch::kFloat);
  Layer made;
  made.layout = layout;
  made.x = torch::randn({3, 7, 40}, options).requires_grad_();
  const auto sizes = layout == WeightLayout::kOutIn
                         ? std::vector<int64_t>{24, 40}
                         : std::vector<int64_t>{40, 24};
  made.weight = torch::randn(sizes, options).mul_(0.2).requires_grad_();
  if (bias) made.bias = torch::randn({24}, options).requires_grad_();
  return made;
}

/// Result and gradients of two micro-batches.
struct LinearOutcome {
  Tensor y;
  Tensors gradients;
};

LinearOutcome run(const Layer& layer, bool autocast) {
  Tensor y;
  for (int i = 0; i < 2; ++i) {
    {
      const compat::AutocastGuard guard(autocast ? half()
                                                 : compat::AutocastState{});
      y = lean_linear(layer.x * (1 + i), layer.weight, layer.bias,
                      layer.layout);
    }
    (y.to(torch::kFloat).sin().sum() / 3).backward();
  }
  Tensors of = {layer.x, layer.weight};
  if (layer.bias.defined()) of.push_back(layer.bias);
  return {y.detach(), take_gradients(of)};
}

TEST(Linear, IsLinear) {
  for (const bool bias : {true, false}) {
    for (const auto layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
      const Layer layer = make_layer(layout, bias);
      const Tensor weight =
          layout == WeightLayout::kOutIn ? layer.weight : layer.weight.t();
      const Tensor y = lean_linear(layer.x, layer.weight, layer.bias, layout);
      const Tensor wanted = torch::linear(layer.x, weight, layer.bias);
      EXPECT_EQ(y.sizes(), wanted.sizes());
      EXPECT_LT(relative_error(y, wanted), 1e-6);
    }
  }
}

TEST(Linear, WithCopiesAsUnderAutocast) {
  for (const bool bias : {true, false}) {
    for (const auto layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
      const Layer layer = make_layer(layout, bias);
      const LinearOutcome exact = run(layer, /*autocast=*/false);
      const LinearOutcome wanted = run(layer, /*autocast=*/true);
      const WeightCopies copies({layer.weight}, torch::kBFloat16);
      const LinearOutcome got = run(layer, /*autocast=*/true);
      EXPECT_EQ(got.y.scalar_type(), torch::kBFloat16);
      EXPECT_EQ(got.y.sizes(), wanted.y.sizes());
      // The same product of the same numbers.
      EXPECT_TRUE(same(got.y, wanted.y));
      ASSERT_EQ(got.gradients.size(), wanted.gradients.size());
      for (size_t i = 0; i < got.gradients.size(); ++i) {
        ASSERT_TRUE(got.gradients[i].defined()) << i;
        EXPECT_EQ(got.gradients[i].scalar_type(), torch::kFloat);
        // Not further from the truth than autocast's.
        EXPECT_LT(relative_error(got.gradients[i], wanted.gradients[i]), 8e-3);
        EXPECT_LT(relative_error(got.gradients[i], exact.gradients[i]),
                  1.2 * relative_error(wanted.gradients[i], exact.gradients[i]))
            << i;
      }
    }
  }
}

TEST(Linear, StraightInSinglePrecision) {
  for (const auto layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
    const Layer layer = make_layer(layout);
    const LinearOutcome wanted = run(layer, /*autocast=*/false);
    const WeightCopies none({layer.weight}, torch::kFloat);
    EXPECT_TRUE(none.copies().empty());
    const LinearOutcome got = run(layer, /*autocast=*/false);
    EXPECT_LT(relative_error(got.y, wanted.y), 1e-6);
    for (size_t i = 0; i < wanted.gradients.size(); ++i) {
      EXPECT_LT(relative_error(got.gradients[i], wanted.gradients[i]), 1e-5);
    }
    // Half precision is another matter.
    EXPECT_TRUE(same(run(layer, true).y, run(layer, true).y));
  }
}

TEST(Linear, BiasesOfManyRows) {
  torch::manual_seed(2);
  const auto options = on_device();
  for (const int64_t columns : {264, 20}) {  // the second in no kernel
    const Tensor x = torch::randn({5000, 16}, options);
    const Tensor weight = torch::randn({columns, 16}, options).requires_grad_();
    const Tensor bias = torch::randn({columns}, options).requires_grad_();
    const WeightCopies copies({weight, bias}, torch::kBFloat16);
    const compat::AutocastGuard autocast(half());
    Tensor wanted = torch::zeros({columns}, options.dtype(torch::kDouble));
    for (int i = 0; i < 2; ++i) {  // the second is added to the first
      const Tensor y = lean_linear(x, weight, bias);
      const Tensor dy = torch::randn_like(y);
      y.backward(dy);
      wanted += dy.to(torch::kDouble).sum(0);
    }
    EXPECT_LT(relative_error(wanted, bias.grad().to(torch::kDouble)), 1e-5);
  }
}

TEST(Linear, ACopyOlderThanItsWeightIsNotTaken) {
  const Layer layer = make_layer(WeightLayout::kOutIn);
  WeightCopies copies({layer.weight}, torch::kBFloat16);
  const auto found = [&] {
    return WeightCopies::find(layer.weight, torch::kBFloat16).defined();
  };
  EXPECT_TRUE(found());
  EXPECT_FALSE(WeightCopies::find(layer.weight, torch::kHalf).defined());
  EXPECT_FALSE(WeightCopies::find(layer.bias, torch::kBFloat16).defined());
  copies.expire();
  EXPECT_FALSE(found());
  copies.refresh();
  EXPECT_TRUE(found());
  const Tensor copy = WeightCopies::find(layer.weight, torch::kBFloat16);
  {
    const torch::NoGradGuard no_grad;
    layer.weight.mul_(2);
  }
  EXPECT_FALSE(found());
  const LinearOutcome now = run(layer, true);
  copies.refresh();
  // In the same place.
  EXPECT_EQ(WeightCopies::find(layer.weight, torch::kBFloat16).data_ptr(),
            copy.data_ptr());
  EXPECT_TRUE(same(copy, layer.weight.to(torch::kBFloat16)));
  EXPECT_TRUE(same(run(layer, true).y, now.y));
}

TEST(Linear, CopiesGoWithTheirOwner) {
  const Layer layer = make_layer(WeightLayout::kOutIn);
  auto copies = std::make_unique<WeightCopies>(
      std::vector<Tensor>{layer.weight, layer.weight, layer.x.detach()},
      torch::kBFloat16);
  EXPECT_EQ(copies->copies().size(), 1U);  // one a weight that is trained
  EXPECT_NE(error_of([&] {
              WeightCopies({layer.weight}, torch::kBFloat16);
            }).find("another one has copies"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              WeightCopies({layer.bias}, torch::kDouble);
            }).find("expected half or single precision"),
            std::string::npos);
  copies.reset();
  EXPECT_FALSE(WeightCopies::find(layer.weight, torch::kBFloat16).defined());
  const WeightCopies again({layer.weight}, torch::kBFloat16);
  EXPECT_TRUE(WeightCopies::find(layer.weight, torch::kBFloat16).defined());
}

TEST(Linear, CopiesHaveRowsOfZerosBehindThem) {
  const auto options = on_device(torch::kFloat);
  const Tensor weight = torch::randn({130, 8}, options).requires_grad_();
  const WeightCopies copies({weight}, torch::kBFloat16);
  const Tensor whole = WeightCopies::find(weight, torch::kBFloat16, true);
  EXPECT_EQ(whole.sizes(), (std::vector<int64_t>{256, 8}));
  EXPECT_EQ(whole.narrow(0, 130, 126).abs().max().item<float>(), 0);
  EXPECT_TRUE(same(whole.narrow(0, 0, 130), weight.to(torch::kBFloat16)));
}

TEST(Linear, KeepsItsInputAlone) {
  const Layer layer = make_layer(WeightLayout::kOutIn);
  const WeightCopies copies({layer.weight}, torch::kBFloat16);
  KeptMeter kept({layer.weight, layer.bias});
  Tensor y;
  {
    const KeptMeter::Scope scope(kept, 0);
    const compat::AutocastGuard guard(half());
    y = lean_linear(layer.x, layer.weight, layer.bias);
  }
  EXPECT_EQ(kept.live_bytes(), allocated_bytes(3 * 7 * 40 * 2, device()));
}

TEST(Linear, InPlaceAfterItAndAgainInCheckpoints) {
  const Layer layer = make_layer(WeightLayout::kOutIn);
  const WeightCopies copies({layer.weight}, torch::kBFloat16);
  const auto block = [&](const Tensor& x) {
    return lean_linear(x, layer.weight, layer.bias).relu_();
  };
  const auto run_block = [&](bool again) {
    Tensor y;
    {
      const compat::AutocastGuard guard(half());
      y = again ? checkpoint(block, layer.x) : block(layer.x);
    }
    y.to(torch::kFloat).square().sum().backward();
    return take_gradients({layer.x, layer.weight, layer.bias});
  };
  const Tensors wanted = run_block(false);
  const Tensors got = run_block(true);
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(same(got[i], wanted[i])) << i;
  }
}

TEST(Linear, ACopyForEachUse) {
  for (const auto layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
    const Layer layer = make_layer(layout);
    std::optional<WeightCopies> copies;
    copies.emplace(Tensors{layer.weight, layer.bias}, torch::kBFloat16);
    const LinearOutcome wanted = run(layer, /*autocast=*/true);
    copies.reset();
    WeightCopiesOptions each;
    each.each_use = true;
    copies.emplace(Tensors{layer.weight, layer.bias}, torch::kBFloat16, each);
    EXPECT_TRUE(copies->copies().empty());
    EXPECT_TRUE(WeightCopies::each_use(layer.weight, torch::kBFloat16));
    EXPECT_FALSE(WeightCopies::each_use(layer.weight, torch::kHalf));
    const Tensor one = WeightCopies::find(layer.weight, torch::kBFloat16);
    EXPECT_NE(one.data_ptr(),
              WeightCopies::find(layer.weight, torch::kBFloat16).data_ptr());
    const Tensor padded =
        WeightCopies::find(layer.weight, torch::kBFloat16, /*padded=*/true);
    EXPECT_EQ(padded.size(0) % 128, 0);
    EXPECT_TRUE(same(padded.narrow(0, 0, one.size(0)), one));
    const LinearOutcome got = run(layer, /*autocast=*/true);
    EXPECT_TRUE(same(got.y, wanted.y));
    for (size_t i = 0; i < wanted.gradients.size(); ++i) {
      EXPECT_TRUE(same(got.gradients[i], wanted.gradients[i])) << i;
    }
  }
}

TEST(Linear, ThreeAsOne) {
  torch::manual_seed(4);
  const auto options = on_device(torch::kFloat);
  const Tensor x = torch::randn({2, 9, 32}, options).requires_grad_();
  std::array<Tensor, 3> weights, biases;
  for (size_t i = 0; i < 3; ++i) {
    weights[i] = torch::randn({128, 32}, options).mul_(0.2).requires_grad_();
    biases[i] = torch::randn({128}, options).requires_grad_();
  }
  const Tensors parameters = {x,         weights[0], weights[1], weights[2],
                              biases[0], biases[1],  biases[2]};
  const Tensors copied(parameters.begin() + 1, parameters.end());
  const auto run_three = [&](bool joined, bool autocast) {
    Tensor y;
    for (int i = 0; i < 2; ++i) {
      {
        const compat::AutocastGuard guard(autocast ? half()
                                                   : compat::AutocastState{});
        if (joined) {
          y = qkv_linear(x * (1 + i), weights, biases);
          TORCH_CHECK(y.defined());
        } else {
          std::vector<Tensor> parts;
          for (size_t k = 0; k < 3; ++k) {
            parts.push_back(lean_linear(x * (1 + i), weights[k], biases[k]));
          }
          y = torch::cat(parts, -1);
        }
      }
      (y.to(torch::kFloat).sin().sum() / 3).backward();
    }
    return LinearOutcome{y.detach(), take_gradients(parameters)};
  };
  const Tensors before = {weights[0].detach().clone(),
                          biases[2].detach().clone()};
  for (const auto type : {torch::kFloat, torch::kBFloat16}) {
    const bool autocast = type == torch::kBFloat16;
    const WeightCopies copies(copied, type);
    const LinearOutcome wanted = run_three(false, autocast);
    if (type == torch::kFloat) {
      // Not before they lie together.
      EXPECT_FALSE(qkv_linear(x, weights, biases).defined());
      pack_contiguous({weights[0], weights[1], weights[2]});
      EXPECT_FALSE(qkv_linear(x, weights, biases).defined());
      pack_contiguous({biases[0], biases[1], biases[2]});
      EXPECT_TRUE(same(weights[0].detach(), before[0]));
      EXPECT_TRUE(same(biases[2].detach(), before[1]));
      continue;  // the copies are of what was there before
    }
    const LinearOutcome got = run_three(true, autocast);
    EXPECT_LT(relative_error(got.y, wanted.y), 1e-2);
    const double rounding =
        std::max(1e-2, 2 * testing::half_product_error(3 * 128));
    for (size_t i = 0; i < parameters.size(); ++i) {
      ASSERT_TRUE(got.gradients[i].defined()) << i;
      EXPECT_EQ(got.gradients[i].sizes(), parameters[i].sizes());
      EXPECT_LT(relative_error(got.gradients[i], wanted.gradients[i]), rounding)
          << i;
    }
  }
  const WeightCopies copies(copied, torch::kFloat);
  const LinearOutcome wanted = run_three(false, false);
  const LinearOutcome got = run_three(true, false);
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_LT(relative_error(got.gradients[i], wanted.gradients[i]), 1e-5) << i;
  }
  // Gradients that were there and do not lie together are added to one by one.
  for (const Tensor& parameter : copied) {
    Tensor(parameter).mutable_grad() = torch::ones_like(parameter.detach());
  }
  const LinearOutcome apart = run_three(true, false);
  for (size_t i = 1; i < 7; ++i) {
    EXPECT_LT(relative_error(apart.gradients[i] - 1, wanted.gradients[i]),
              1e-5);
  }
}

TEST(Linear, ThreeAsOneConvertedAtEachUse) {
  torch::manual_seed(6);
  const auto options = on_device(torch::kFloat);
  const Tensor x = torch::randn({2, 9, 32}, options);
  std::array<Tensor, 3> weights, biases;
  for (size_t i = 0; i < 3; ++i) {
    weights[i] = torch::randn({128, 32}, options).requires_grad_();
    biases[i] = torch::randn({128}, options).requires_grad_();
  }
  pack_contiguous({weights[0], weights[1], weights[2]});
  pack_contiguous({biases[0], biases[1], biases[2]});
  const Tensors all = {weights[0], weights[1], weights[2],
                       biases[0],  biases[1],  biases[2]};
  const auto now = [&] {
    const compat::AutocastGuard guard(half());
    return qkv_linear(x, weights, biases);
  };
  Tensor wanted;
  {
    const WeightCopies copies(all, torch::kBFloat16);
    wanted = now();
  }
  WeightCopiesOptions each;
  each.each_use = true;
  WeightCopies copies(all, torch::kBFloat16, each);
  EXPECT_TRUE(same(now(), wanted));
  // Not outside of autocast, where they are of another type, and not too old.
  EXPECT_FALSE(qkv_linear(x, weights, biases).defined());
  copies.expire();
  EXPECT_FALSE(now().defined());
}

TEST(Linear, CrossEntropyOfACopy) {
  torch::manual_seed(9);
  const auto options = on_device(torch::kFloat);
  const Tensor hidden = torch::randn({50, 32}, options).requires_grad_();
  const Tensor weight =
      torch::randn({77, 32}, options).mul_(0.3).requires_grad_();
  const Tensor targets = torch::randint(77, {50}, on_device(torch::kLong));
  for (const auto how : {WeightGradient::kByRows, WeightGradient::kByColumns}) {
    LinearCrossEntropyOptions chunks;
    chunks.chunk_scores = 1000;
    chunks.weight_gradient = how;
    const auto outcome = [&] {
      Tensor loss;
      for (int i = 0; i < 2; ++i) {  // the gradient adds up
        const compat::AutocastGuard guard(half());
        loss = linear_cross_entropy(hidden, weight, {}, targets, chunks).loss;
        (loss / 7).backward();
      }
      return std::pair(loss.detach(), take_gradients({hidden, weight}));
    };
    const auto wanted = outcome();
    const WeightCopies copies({weight}, torch::kBFloat16);
    const auto got = outcome();
    EXPECT_LT(relative_error(got.first, wanted.first), 1e-6);
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(got.second[i].defined());
      EXPECT_LT(relative_error(got.second[i], wanted.second[i]), 4e-3);
    }
  }
}

}  // namespace
}  // namespace reprise
