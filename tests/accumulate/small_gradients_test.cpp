#include "accumulate/small_gradients.h"

#include "support.h"

#include <reprise/ops/linear.h>
#include <reprise/ops/weight_copies.h>

namespace reprise {
namespace {

using testing::on_device;
using testing::same;
using torch::Tensor;

struct Two {
  Tensor small, large;
};

Two make_two() {
  torch::manual_seed(2);
  const auto options = on_device(torch::kFloat);
  return {torch::randn({8}, options).requires_grad_(),
          torch::randn({40, 8}, options).requires_grad_()};
}

void backward(const Two& two, int i) {
  ((two.large * (i + 1)).sin() * two.small + two.small.cos()).sum().backward();
}

TEST(SmallGradients, AddsTheSameSumsInPlace) {
  const Two wanted = make_two();
  const Two got = make_two();
  const void* place = nullptr;
  for (int i = 0; i < 3; ++i) {
    backward(wanted, i);
    SmallGradients small(smallest_parameters({got.large, got.small}, 0.1));
    backward(got, i);
    // The large one is not set aside: autograd has added it already.
    EXPECT_TRUE(same(got.large.grad(), wanted.large.grad())) << i;
    if (i > 0) {
      EXPECT_FALSE(same(got.small.grad(), wanted.small.grad()));
    }
    small.add();
    EXPECT_TRUE(same(got.small.grad(), wanted.small.grad())) << i;
    if (i == 0) place = got.small.grad().data_ptr();
    EXPECT_EQ(got.small.grad().data_ptr(), place);
  }
}

TEST(SmallGradients, RestoresGradientsWithoutAdd) {
  const Two two = make_two();
  backward(two, 0);
  const Tensor before = two.small.grad().clone();
  {
    const SmallGradients small({two.small});
    backward(two, 1);
  }
  EXPECT_TRUE(same(two.small.grad(), before));
}

TEST(SmallGradients, KeepsGradientsOfUnusedParameters) {
  const Two two = make_two();
  backward(two, 0);
  const Tensor before = two.small.grad().clone();
  SmallGradients small({two.small, two.large});
  small.add();
  EXPECT_TRUE(same(two.small.grad(), before));
  EXPECT_TRUE(two.large.grad().defined());
}

/// A linear layer and a scale of its outputs.
struct Scaled {
  Tensor weight, bias, scale;

  Scaled() {
    torch::manual_seed(4);
    const auto options = on_device(torch::kFloat);
    weight = torch::randn({8, 16}, options).requires_grad_();
    bias = torch::randn({8}, options).requires_grad_();
    scale = torch::randn({8}, options).requires_grad_();
  }
  void backward(int i) const {
    const Tensor x = torch::full({3, 16}, 0.1 * (i + 1), on_device());
    (ops::linear(x, weight, bias) * scale).sin().sum().backward();
  }
};

TEST(SmallGradients, OperatorsAddToTheGradientsOfExcludedWeights) {
  const Scaled wanted, got;
  const WeightCopies wanted_copies({wanted.weight, wanted.bias}, torch::kFloat);
  const WeightCopies copies({got.weight, got.bias}, torch::kFloat);
  const std::vector<Tensor> parameters = {got.scale, got.bias, got.weight};
  for (int i = 0; i < 3; ++i) {
    wanted.backward(i);
    SmallGradients small(without(parameters, copies.weights()));
    got.backward(i);
    // The operators have added already, and the scale is set aside.
    EXPECT_TRUE(same(got.weight.grad(), wanted.weight.grad())) << i;
    EXPECT_TRUE(same(got.bias.grad(), wanted.bias.grad())) << i;
    EXPECT_EQ(same(got.scale.grad(), wanted.scale.grad()), i == 0) << i;
    small.add();
    EXPECT_TRUE(same(got.weight.grad(), wanted.weight.grad())) << i;
    EXPECT_TRUE(same(got.bias.grad(), wanted.bias.grad())) << i;
    EXPECT_TRUE(same(got.scale.grad(), wanted.scale.grad())) << i;
  }
}

TEST(SmallGradients, ExcludesTheGivenParameters) {
  const Tensor a = torch::zeros({2}), b = torch::zeros({2}),
               c = torch::zeros({2});
  const auto rest = without({c, a, b}, {a, torch::zeros({2})});
  ASSERT_EQ(rest.size(), 2u);
  EXPECT_TRUE(rest[0].is_same(c));
  EXPECT_TRUE(rest[1].is_same(b));
  EXPECT_TRUE(without({a}, {a}).empty());
  EXPECT_EQ(without({a, b}, {}).size(), 2u);
}

TEST(SmallGradients, SelectsTheSmallestParameters) {
  const auto of = [](int64_t count) { return torch::zeros({count}); };
  // 1,000 elements in total.
  const std::vector<Tensor> parameters = {of(900), of(40), of(10), of(50)};
  const auto sizes = [&](double share) {
    std::vector<int64_t> list;
    for (const Tensor& one : smallest_parameters(parameters, share)) {
      list.push_back(one.numel());
    }
    return list;
  };
  EXPECT_EQ(sizes(0.005), std::vector<int64_t>{});
  EXPECT_EQ(sizes(0.055), (std::vector<int64_t>{10, 40}));
  EXPECT_EQ(sizes(0.5), (std::vector<int64_t>{10, 40, 50}));
  EXPECT_EQ(sizes(1.01).size(), 4u);
  EXPECT_EQ(smallest_parameters({of(65537), of(65536)}, 2.0).size(), 1u);
  EXPECT_TRUE(smallest_parameters({}).empty());
}

}  // namespace
}  // namespace reprise
