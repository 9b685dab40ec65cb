#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/ops/concat.h>

#include <vector>

namespace reprise {
namespace {

using testing::error_of;
using testing::on_device;
using testing::relative_error;
using testing::same;
using testing::take_gradients;
using torch::Tensor;

constexpr auto kRows = at::MemoryFormat::ChannelsLast;

struct Joined {
  Tensor y;
  Tensors gradients;  // of a, b and the bias
};

template <class F>
Joined join(const Tensors& values, const F& concat) {
  Tensors inputs;
  for (const Tensor& value : values) {
    inputs.push_back(value.detach().clone().requires_grad_());
  }
  const Tensor y = concat(inputs);
  y.backward(torch::arange(y.numel(), torch::dtype(torch::kFloat))
                 .mul_(0.3)
                 .sin_()
                 .view(y.sizes())
                 .to(y.options()));
  return {y.detach(), take_gradients(inputs)};
}

Tensor images(int64_t channels, torch::ScalarType type) {
  return torch::randn({3, channels, 5, 7}, on_device(type)).contiguous(kRows);
}

const std::vector<std::pair<int64_t, int64_t>> kChannels = {
    {8, 8}, {16, 8}, {64, 128}, {4, 12}, {3, 5}};

// Numbers of channels that are multiples of 8, of 4, and of neither.
TEST(Concat, WithoutBiasEqualsCat) {
  torch::manual_seed(1);
  for (const auto type :
       {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
    for (const auto& [left, right] : kChannels) {
      const Tensors values{images(left, type), images(right, type)};
      const Joined ours = join(values, [](const Tensors& in) {
        return ops::concat_channels(in[0], in[1]);
      });
      const Joined cat = join(values, [](const Tensors& in) {
        return torch::cat({in[0], in[1]}, 1);
      });
      EXPECT_TRUE(same(ours.y, cat.y));
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_TRUE(same(ours.gradients[i], cat.gradients[i]));
        EXPECT_EQ(ours.gradients[i].strides(), values[i].strides());
      }
    }
  }
}

TEST(Concat, AddsTheBias) {
  torch::manual_seed(2);
  for (const auto type : {torch::kFloat, torch::kBFloat16}) {
    for (const auto& [left, right] : kChannels) {
      const Tensors values{images(left, type), images(right, type),
                           torch::randn({right}, on_device())};
      const Joined ours = join(values, [](const Tensors& in) {
        return ops::concat_channels(in[0], in[1], in[2]);
      });
      Tensors exact;
      for (const Tensor& value : values) {
        exact.push_back(value.to(torch::kDouble));
      }
      const Joined expected = join(exact, [](const Tensors& in) {
        return torch::cat({in[0], in[1] + in[2].view({1, -1, 1, 1})}, 1);
      });
      const double most = type == torch::kFloat ? 1e-6 : 1e-2;
      EXPECT_LE(relative_error(ours.y, expected.y), most);
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_LE(relative_error(ours.gradients[i], expected.gradients[i]),
                  most);
      }
    }
  }
}

TEST(Concat, OtherLayoutsAndTypes) {
  torch::manual_seed(3);
  const auto cat = [](const Tensors& in) {
    return torch::cat({in[0], in[1]}, 1);
  };
  const auto ours = [](const Tensors& in) {
    return ops::concat_channels(in[0], in[1]);
  };
  const Tensor planes = torch::randn({3, 8, 5, 7}, on_device());
  for (const Tensors& values :
       {Tensors{planes, images(8, torch::kFloat)}, Tensors{planes, planes},
        Tensors{images(8, torch::kFloat), images(8, torch::kBFloat16)}}) {
    const Joined a = join(values, ours), b = join(values, cat);
    EXPECT_TRUE(same(a.y, b.y));
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(same(a.gradients[i], b.gradients[i]));
    }
  }
}

TEST(Concat, OneInputWithoutGradient) {
  torch::manual_seed(4);
  const Tensor a = images(8, torch::kFloat).requires_grad_();
  const Tensor b = images(8, torch::kFloat);
  const Tensor weights = torch::randn({3, 16, 5, 7}, on_device());
  ops::concat_channels(a, b).backward(weights);
  EXPECT_TRUE(same(take_gradients({a})[0], weights.narrow(1, 0, 8)));
  ops::concat_channels(b, a).backward(weights);
  EXPECT_TRUE(same(take_gradients({a})[0], weights.narrow(1, 8, 8)));
}

TEST(Concat, KeepsNothing) {
  const Tensor a = images(8, torch::kFloat).requires_grad_();
  const Tensor b = images(8, torch::kFloat).requires_grad_();
  KeptMeter kept;
  const KeptMeter::Scope scope(kept, 0);
  const Tensor y = ops::concat_channels(a, b);
  EXPECT_EQ(kept.live_bytes(), 0);
}

TEST(Concat, RejectsOtherShapes) {
  const Tensor a = images(8, torch::kFloat);
  EXPECT_NE(error_of([&] {
              ops::concat_channels(a, a.narrow(2, 0, 3));
            }).find("differ in C only"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              ops::concat_channels(a, a, torch::zeros({5}, on_device()));
            }).find("a bias for 8 channels"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
