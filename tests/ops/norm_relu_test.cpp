#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/ops/norm.h>

#include <torch/nn/modules/normalization.h>

namespace reprise {
namespace {

using ops::NormActivation;
using testing::on_device;
using testing::relative_error;
using testing::same;
using testing::take_gradients;
using torch::Tensor;

struct NormSize {
  int64_t samples, channels, height, width, groups;  // 0: BatchNorm
};

// Odd sides; planes of several parts, of less than one block, and of one value.
const NormSize kNormSizes[] = {
    {3, 4, 5, 6, 0},     {3, 4, 5, 7, 0},     {2, 8, 7, 9, 2},
    {3, 6, 8, 8, 0},     {2, 3, 150, 140, 0}, {1, 16, 6, 6, 2},
    {2, 2, 131, 133, 1}, {4, 3, 1, 1, 0},     {1, 8, 2, 2, 1},
};

struct Normed {
  Tensor y;
  Tensors gradients;
  Tensors buffers;
};

template <class Norm>
void draw(Norm& norm) {
  const torch::NoGradGuard no_grad;
  norm->weight
      .normal_();  // a negative weight turns the maximum into the minimum
  norm->bias.normal_();
}

/// Two passes, so that running statistics are updated twice.
template <class Norm, class F>
Normed run(Norm norm, const Tensor& values, const F& forward) {
  const Tensor x = values.detach().clone().requires_grad_();
  Normed outcome;
  for (int i = 0; i < 2; ++i) {
    outcome.y = forward(norm, x * (1 + i));
    (outcome.y * (outcome.y.detach() + 0.5)).sum().backward();
  }
  outcome.gradients = take_gradients({x, norm->weight, norm->bias});
  for (const Tensor& buffer : norm->buffers()) {
    outcome.buffers.push_back(buffer.to(torch::kFloat).clone());
  }
  outcome.y = outcome.y.detach();
  return outcome;
}

template <class Norm>
void expect_like_libtorch(const Norm& make, const Tensor& values,
                          NormActivation activation) {
  auto one = make(), other = make();
  {
    const torch::NoGradGuard no_grad;
    other->weight.copy_(one->weight);
    other->bias.copy_(one->bias);
  }
  const Normed wanted = run(one, values, [&](auto norm, const Tensor& x) {
    const Tensor y = torch::relu(norm->forward(x));
    return activation == NormActivation::kRelu ? y : torch::max_pool2d(y, 2);
  });
  const Normed got = run(other, values, [&](auto norm, const Tensor& x) {
    return ops::norm_relu(norm, x, activation);
  });
  EXPECT_EQ(got.y.sizes(), wanted.y.sizes());
  EXPECT_LT(relative_error(got.y, wanted.y), 1e-5);
  for (size_t i = 0; i < wanted.gradients.size(); ++i) {
    EXPECT_LT(relative_error(got.gradients[i], wanted.gradients[i]), 2e-5) << i;
  }
  ASSERT_EQ(got.buffers.size(), wanted.buffers.size());
  for (size_t i = 0; i < wanted.buffers.size(); ++i) {
    EXPECT_LT(relative_error(got.buffers[i], wanted.buffers[i]), 1e-6) << i;
  }
}

TEST(NormRelu, MatchesLibTorch) {
  torch::manual_seed(3);
  for (const NormSize& size : kNormSizes) {
    const Tensor values =
        torch::randn({size.samples, size.channels, size.height, size.width},
                     on_device(torch::kFloat))
            .mul_(2)
            .add_(5);
    for (const NormActivation activation :
         {NormActivation::kRelu, NormActivation::kReluMaxPool,
          NormActivation::kReluCompactMaxPool}) {
      if (activation != NormActivation::kRelu && size.height < 2) continue;
      SCOPED_TRACE(::testing::Message()
                   << values.sizes() << " groups " << size.groups
                   << " activation " << static_cast<int>(activation));
      if (size.groups == 0) {
        expect_like_libtorch(
            [&] {
              torch::nn::BatchNorm2d norm(size.channels);
              norm->to(testing::device());
              draw(norm);
              return norm;
            },
            values, activation);
      } else {
        expect_like_libtorch(
            [&] {
              torch::nn::GroupNorm norm(
                  torch::nn::GroupNormOptions(size.groups, size.channels));
              norm->to(testing::device());
              draw(norm);
              return norm;
            },
            values, activation);
      }
    }
  }
}

TEST(NormRelu, IsReproducible) {
  torch::manual_seed(4);
  torch::nn::BatchNorm2d norm(3);
  norm->to(testing::device());
  const Tensor x = torch::randn({2, 3, 200, 190}, on_device(torch::kFloat));
  const auto once = [&](const torch::nn::BatchNorm2d& n, const Tensor& values) {
    return ops::norm_relu(n, values, NormActivation::kReluMaxPool);
  };
  const Normed first = run(norm, x, once);
  const Normed second = run(norm, x, once);
  EXPECT_TRUE(same(first.y, second.y));
  for (size_t i = 0; i < first.gradients.size(); ++i) {
    EXPECT_TRUE(same(first.gradients[i], second.gradients[i])) << i;
  }
}

TEST(NormRelu, EvaluationUsesRunningStatistics) {
  torch::manual_seed(5);
  torch::nn::BatchNorm2d norm(4);
  norm->to(testing::device());
  const Tensor x = torch::randn({2, 4, 6, 6}, on_device(torch::kFloat));
  (void)ops::norm_relu(norm, x);
  norm->eval();
  const torch::NoGradGuard no_grad;
  const Tensor before = norm->running_mean.clone();
  EXPECT_TRUE(same(ops::norm_relu(norm, x), torch::relu(norm->forward(x))));
  EXPECT_TRUE(same(before, norm->running_mean));
}

TEST(NormRelu, PropagatesNaN) {
  torch::nn::GroupNorm norm(torch::nn::GroupNormOptions(1, 2));
  norm->to(testing::device());
  Tensor x = torch::randn({2, 2, 4, 4}, on_device(torch::kFloat));
  x[1][0][0][0] = std::numeric_limits<float>::quiet_NaN();
  for (const NormActivation activation :
       {NormActivation::kRelu, NormActivation::kReluMaxPool}) {
    const Tensor y = ops::norm_relu(norm, x, activation);
    EXPECT_FALSE(y[0].isnan().any().item<bool>());
    EXPECT_TRUE(y[1].isnan().all().item<bool>());
  }
}

TEST(NormRelu, RejectsOneValuePerChannel) {
  torch::nn::BatchNorm2d norm(3);
  norm->to(testing::device());
  const Tensor x = torch::randn({1, 3, 1, 1}, on_device(torch::kFloat));
  EXPECT_THROW((void)ops::norm_relu(norm, x), std::exception);
}

TEST(NormRelu, MatchesFallback) {
  torch::manual_seed(6);
  const Tensor x = torch::randn({3, 4, 9, 8}, on_device(torch::kFloat));
  for (const auto activation :
       {NormActivation::kRelu, NormActivation::kReluMaxPool,
        NormActivation::kReluCompactMaxPool}) {
    torch::nn::BatchNorm2d norm(4);
    norm->to(testing::device());
    draw(norm);
    const auto one = run(norm, x, [&](auto n, const Tensor& values) {
      return ops::norm_relu(n, values, activation);
    });
    const auto other = run(norm, x, [&](auto n, const Tensor& values) {
      return ops::fallback::norm_relu(n, values, activation);
    });
    EXPECT_LT(relative_error(one.y, other.y), 1e-5);
    for (size_t i = 0; i < one.gradients.size(); ++i) {
      EXPECT_LT(relative_error(one.gradients[i], other.gradients[i]), 2e-5);
    }
  }
}

}  // namespace
}  // namespace reprise
