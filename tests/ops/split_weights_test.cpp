#include "ops/split_weights.h"

#include "linear_layer.h"

#include <reprise/memory/meter.h>
#include <reprise/ops/loss.h>
#include <reprise/ops/weight_copies.h>

#include <cmath>
#include <limits>
#include <memory>

namespace reprise {
namespace {

using testing::device;
using testing::half;
using testing::on_device;
using testing::relative_error;
using testing::same;
using testing::take_gradients;
using torch::Tensor;

bool same_bits(const Tensor& a, const Tensor& b) {
  return torch::equal(a.view(torch::kInt), b.view(torch::kInt));
}

TEST(SplitWeights, MergingRestoresEveryBit) {
  torch::manual_seed(4);
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 8},
                                      {3, 24},
                                      {130, 768},
                                      {17, 2056},
                                      {5, 6400},
                                      {2, 16384},
                                      {2, 16392}}) {
    // Any bits: infinities, denormal numbers, both zeros.
    const Tensor bits = torch::randint(std::numeric_limits<int32_t>::min(),
                                       std::numeric_limits<int32_t>::max(),
                                       {rows, columns}, torch::kLong)
                            .to(torch::kInt)
                            .to(device());
    const Tensor weight = bits.view(torch::kFloat);
    ASSERT_TRUE(detail::can_split(weight));
    const Tensor original = weight.clone();
    detail::split_weight(weight);
    const Tensor upper = detail::upper_half(weight).to(torch::kFloat);
    const Tensor normal = original.abs().lt(1e38) & original.abs().gt(1e-35);
    const Tensor off = (upper - original).abs() / original.abs();
    EXPECT_LE(off.masked_select(normal).max().item<double>(), 1.0 / 256)
        << rows << " × " << columns;
    detail::merge_weight(weight);
    EXPECT_TRUE(same_bits(weight, original)) << rows << " × " << columns;
  }
}

TEST(SplitWeights, SplittingAndMergingNeedLittleMemory) {
  const Tensor weight = torch::randn({1024, 1024}, on_device());
  MemoryMeter meter(device());
  detail::split_weight(weight);
  detail::merge_weight(weight);
  EXPECT_LT(meter.peak_increase_bytes(),
            static_cast<int64_t>(weight.nbytes()) / 4);
}

TEST(SplitWeights, RoundsToNearest) {
  const Tensor values = torch::tensor({1.0F, -1.0F, 1.00390625F, 1.0117187F,
                                       3.1415927F, -0.1F, 0.0F, 65280.0F})
                            .view({1, 8})
                            .to(device());
  const Tensor weight = values.clone();
  detail::split_weight(weight);
  Tensor wanted = values.to(torch::kBFloat16);
  // Exactly between 1 and 1.0078125: away from zero.
  wanted[0][2] = 1.0078125F;
  EXPECT_TRUE(same(detail::upper_half(weight), wanted));
}

TEST(SplitWeights, RefusesOtherMatrices) {
  const auto options = on_device();
  EXPECT_FALSE(detail::can_split(torch::zeros({4, 12}, options)));
  EXPECT_FALSE(detail::can_split(torch::zeros({16}, options)));
  EXPECT_FALSE(detail::can_split(torch::zeros({8, 16}, options).t()));
  EXPECT_FALSE(
      detail::can_split(torch::zeros({8, 16}, options).to(torch::kBFloat16)));
}

/// The same matrix products with copies of both kinds.
class SplitCopies : public ::testing::TestWithParam<ops::WeightLayout> {};

TEST_P(SplitCopies, EqualOrdinaryCopies) {
  torch::manual_seed(6);
  const auto options = on_device();
  const Tensor x = torch::randn({2, 60, 64}, options).requires_grad_();
  const Tensor weight = torch::randn({64, 64}, options).requires_grad_();
  const Tensor bias = torch::randn({64}, options).requires_grad_();
  const Tensor original = weight.detach().clone();
  const auto run = [&](bool split) {
    WeightCopiesOptions how;
    how.split = split;
    WeightCopies copies({weight, bias}, torch::kBFloat16, how);
    Tensor y;
    for (int window = 0; window < 2; ++window) {
      copies.refresh();
      const compat::AutocastGuard autocast(half());
      y = ops::linear(x, weight, bias, GetParam());
      y.sin().sum().backward();
      copies.expire();
      EXPECT_TRUE(same_bits(weight.detach(), original));
      EXPECT_FALSE(WeightCopies::has(weight));
    }
    return testing::LinearOutcome{y.detach(),
                                  take_gradients({x, weight, bias})};
  };
  const auto wanted = run(false), got = run(true);
  EXPECT_TRUE(same(got.y, wanted.y));
  for (size_t i = 0; i < wanted.gradients.size(); ++i) {
    EXPECT_LT(relative_error(got.gradients[i], wanted.gradients[i]), 1e-6) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, SplitCopies,
                         ::testing::Values(ops::WeightLayout::kOutIn,
                                           ops::WeightLayout::kInOut));

TEST(SplitWeights, PackedLayersStayOneProduct) {
  torch::manual_seed(7);
  const auto options = on_device();
  std::vector<Tensor> weights;
  for (const int64_t rows : {256, 128, 128}) {
    weights.push_back(torch::randn({rows, 40}, options).requires_grad_());
  }
  ops::pack_contiguous(weights);
  const Tensor x = torch::randn({5, 40}, options);
  const compat::AutocastGuard autocast(half());
  const auto run = [&](bool split) {
    WeightCopiesOptions how;
    how.split = split;
    const WeightCopies copies(weights, torch::kBFloat16, how);
    const Tensor y = ops::joined_linear(x, weights);
    EXPECT_TRUE(y.defined());
    y.to(torch::kFloat).sin().sum().backward();
    Tensors result = take_gradients(weights);
    result.push_back(y.detach());
    return result;
  };
  const Tensors wanted = run(false), got = run(true);
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_LT(relative_error(got[i], wanted[i]), 1e-6) << i;
  }
}

TEST(SplitWeights, OutputLayersWithOddVocabularies) {
  torch::manual_seed(8);
  const auto options = on_device();
  for (const int64_t words : {256, 203}) {
    const Tensor hidden = torch::randn({30, 64}, options).requires_grad_();
    const Tensor weight =
        torch::randn({words, 64}, options).div_(8).requires_grad_();
    const Tensor targets =
        torch::randint(0, words, {30}, options.dtype(torch::kLong));
    const auto run = [&](bool split) {
      WeightCopiesOptions how;
      how.split = split;
      const WeightCopies copies({weight}, torch::kBFloat16, how);
      const compat::AutocastGuard autocast(half());
      const Tensor loss =
          ops::linear_cross_entropy(hidden, weight, {}, targets).loss;
      loss.backward();
      Tensors result = take_gradients({hidden, weight});
      result.push_back(loss.detach());
      return result;
    };
    const Tensors wanted = run(false), got = run(true);
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_LT(relative_error(got[i], wanted[i]), 1e-5) << words << " " << i;
    }
  }
}

TEST(SplitWeights, TakeNoMemoryAndEndWithTheirOwner) {
  const auto options = on_device();
  const Tensor weight = torch::randn({512, 1024}, options).requires_grad_();
  const Tensor shared = torch::randn({512, 1024}, options).requires_grad_();
  const Tensor original = weight.detach().clone();
  WeightCopiesOptions how;
  how.split = true;
  how.shared_weights = {shared};
  MemoryMeter meter(device());
  auto copies = std::make_unique<WeightCopies>(
      std::vector<Tensor>{weight, shared}, torch::kBFloat16, how);
  int64_t bytes = 0;
  for (const Tensor& copy : copies->copies()) {
    bytes += static_cast<int64_t>(copy.nbytes());
  }
  EXPECT_EQ(bytes, 512 * 1024 * 2);  // of `shared` alone
  EXPECT_TRUE(WeightCopies::find(weight, torch::kBFloat16).defined());
  EXPECT_FALSE(WeightCopies::memory_of(weight).defined());
  EXPECT_FALSE(same_bits(weight.detach(), original));
  copies.reset();
  EXPECT_TRUE(same_bits(weight.detach(), original));
}

TEST(SplitWeights, StayWholeForOtherReaders) {
  torch::manual_seed(9);
  const auto options = on_device();
  const Tensor plain = torch::randn({16, 64}, options).requires_grad_();
  const Tensor precise = torch::randn({16, 64}, options).requires_grad_();
  const Tensor both = torch::randn({16, 64}, options).requires_grad_();
  const Tensor x = torch::randn({4, 64}, options).requires_grad_();
  const Tensors weights = {plain, precise, both};
  const auto in_half = [&](const Tensor& weight) {
    const compat::AutocastGuard autocast(half());
    return ops::linear(x, weight, {}).to(torch::kFloat);
  };
  // One weight is read by LibTorch; the others in both precisions, in either order.
  const auto run = [&] {
    Tensor y = torch::linear(x, plain) + ops::linear(x, precise, {});
    y = y + in_half(precise) + in_half(both);
    y = y + ops::linear(x, both, {});
    y.sin().sum().backward();
    Tensors result = take_gradients({x, plain, precise, both});
    result.push_back(y.detach());
    return result;
  };
  Tensors originals;
  for (const Tensor& weight : weights) {
    originals.push_back(weight.detach().clone());
  }
  const Tensors wanted = run();
  WeightCopiesOptions how;
  how.split = true;
  WeightCopies copies(weights, torch::kBFloat16, how);
  for (int window = 0; window < 2; ++window) {
    copies.refresh();
    const Tensors got = run();
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_LT(relative_error(got[i], wanted[i]), 1e-2) << window << " " << i;
    }
    EXPECT_FALSE(WeightCopies::is_split(plain));
    EXPECT_FALSE(WeightCopies::is_split(precise));
    EXPECT_TRUE(WeightCopies::is_split(both));
    copies.expire();
    for (size_t i = 0; i < weights.size(); ++i) {
      EXPECT_TRUE(same_bits(weights[i].detach(), originals[i])) << i;
    }
  }
}

}  // namespace
}  // namespace reprise
