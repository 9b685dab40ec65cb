#include "linear_layer.h"

#include <reprise/ops/loss.h>
#include <reprise/ops/weight_copies.h>

#include <memory>
#include <optional>

namespace reprise {
namespace {

using testing::error_of;
using testing::half;
using testing::Layer;
using testing::LinearOutcome;
using testing::make_layer;
using testing::on_device;
using testing::relative_error;
using testing::run_layer;
using testing::same;
using testing::take_gradients;
using torch::Tensor;

TEST(WeightCopies, OutdatedCopyIsNotUsed) {
  const Layer layer = make_layer(ops::WeightLayout::kOutIn);
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
  const LinearOutcome now = run_layer(layer, true);
  copies.refresh();
  // In the same memory.
  EXPECT_EQ(WeightCopies::find(layer.weight, torch::kBFloat16).data_ptr(),
            copy.data_ptr());
  EXPECT_TRUE(same(copy, layer.weight.to(torch::kBFloat16)));
  EXPECT_TRUE(same(run_layer(layer, true).y, now.y));
}

TEST(WeightCopies, OneOwnerPerWeight) {
  const Layer layer = make_layer(ops::WeightLayout::kOutIn);
  auto copies = std::make_unique<WeightCopies>(
      std::vector<Tensor>{layer.weight, layer.weight, layer.x.detach()},
      torch::kBFloat16);
  EXPECT_EQ(copies->copies().size(), 1U);  // one tensor for all copies
  ASSERT_EQ(copies->weights().size(), 1U);
  EXPECT_TRUE(copies->weights()[0].is_same(layer.weight));
  EXPECT_NE(error_of([&] {
              WeightCopies({layer.weight}, torch::kBFloat16);
            }).find("another WeightCopies holds"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              WeightCopies({layer.bias}, torch::kDouble);
            }).find("expected float16, bfloat16 or float32"),
            std::string::npos);
  copies.reset();
  EXPECT_FALSE(WeightCopies::find(layer.weight, torch::kBFloat16).defined());
  const WeightCopies again({layer.weight}, torch::kBFloat16);
  EXPECT_TRUE(WeightCopies::find(layer.weight, torch::kBFloat16).defined());
}

TEST(WeightCopies, CopiesArePaddedWithZeros) {
  const auto options = on_device(torch::kFloat);
  const Tensor weight = torch::randn({130, 8}, options).requires_grad_();
  const WeightCopies copies({weight}, torch::kBFloat16);
  const Tensor whole = WeightCopies::find(weight, torch::kBFloat16, true);
  EXPECT_EQ(whole.sizes(), (std::vector<int64_t>{256, 8}));
  EXPECT_EQ(whole.narrow(0, 130, 126).abs().max().item<float>(), 0);
  EXPECT_TRUE(same(whole.narrow(0, 0, 130), weight.to(torch::kBFloat16)));
}

TEST(WeightCopies, ConvertPerUse) {
  for (const auto layout :
       {ops::WeightLayout::kOutIn, ops::WeightLayout::kInOut}) {
    const Layer layer = make_layer(layout);
    std::optional<WeightCopies> copies;
    copies.emplace(Tensors{layer.weight, layer.bias}, torch::kBFloat16);
    const LinearOutcome wanted = run_layer(layer, /*autocast=*/true);
    copies.reset();
    WeightCopiesOptions each;
    each.convert_per_use = true;
    copies.emplace(Tensors{layer.weight, layer.bias}, torch::kBFloat16, each);
    EXPECT_TRUE(copies->copies().empty());
    EXPECT_TRUE(WeightCopies::converts_per_use(layer.weight, torch::kBFloat16));
    EXPECT_FALSE(WeightCopies::converts_per_use(layer.weight, torch::kHalf));
    const Tensor one = WeightCopies::find(layer.weight, torch::kBFloat16);
    EXPECT_NE(one.data_ptr(),
              WeightCopies::find(layer.weight, torch::kBFloat16).data_ptr());
    const Tensor padded =
        WeightCopies::find(layer.weight, torch::kBFloat16, /*padded=*/true);
    EXPECT_EQ(padded.size(0) % 128, 0);
    EXPECT_TRUE(same(padded.narrow(0, 0, one.size(0)), one));
    const LinearOutcome got = run_layer(layer, /*autocast=*/true);
    EXPECT_TRUE(same(got.y, wanted.y));
    for (size_t i = 0; i < wanted.gradients.size(); ++i) {
      EXPECT_TRUE(same(got.gradients[i], wanted.gradients[i])) << i;
    }
  }
}

TEST(WeightCopies, LinearCrossEntropyUsesCopy) {
  torch::manual_seed(9);
  const auto options = on_device(torch::kFloat);
  const Tensor hidden = torch::randn({50, 32}, options).requires_grad_();
  const Tensor weight =
      torch::randn({77, 32}, options).mul_(0.3).requires_grad_();
  const Tensor targets = torch::randint(77, {50}, on_device(torch::kLong));
  for (const auto how : {ops::WeightGradientOrder::kByRows,
                         ops::WeightGradientOrder::kByColumns}) {
    ops::LinearCrossEntropyOptions chunks;
    chunks.chunk_scores = 1000;
    chunks.weight_gradient = how;
    const auto outcome = [&] {
      Tensor loss;
      for (int i = 0; i < 2; ++i) {  // the gradient adds up
        const compat::AutocastGuard guard(half());
        loss =
            ops::linear_cross_entropy(hidden, weight, {}, targets, chunks).loss;
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
