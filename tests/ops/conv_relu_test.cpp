#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/ops/conv.h>

#include <ATen/Context.h>

namespace reprise {
namespace {

using ops::ConvReluOptions;
using ops::MaxPoolOptions;
using testing::on_device;
using testing::relative_error;
using testing::same;
using testing::take_gradients;
using torch::Tensor;
using torch::nn::Conv2d;
using torch::nn::Conv2dOptions;

constexpr auto kRowsFormat = at::MemoryFormat::ChannelsLast;

struct Activated {
  Tensor y;
  Tensors gradients;  // of x, weight and bias
};

/// `forward` gets the layer and x. Gradients differ from element to element.
template <class F>
Activated run_layer(Conv2d conv, const Tensor& values, const F& forward) {
  const Tensor x = values.detach().clone().requires_grad_();
  const Tensor y = forward(conv, x);
  y.backward(torch::arange(y.numel(), torch::dtype(torch::kFloat))
                 .mul_(0.7)
                 .sin_()
                 .view(y.sizes())
                 .to(y.options()));
  Tensors inputs = conv->parameters();
  inputs.push_back(x);
  return {y.detach(), take_gradients(inputs)};
}

std::vector<ConvReluOptions> pool_options() {
  std::vector<ConvReluOptions> all(1);
  for (const bool compact : {false, true}) {
    all.push_back({MaxPoolOptions{}, compact});
    all.push_back({MaxPoolOptions{3, 2, 1}, compact});
  }
  return all;
}

Tensor plain_layer(Conv2d conv, const Tensor& x,
                   const ConvReluOptions& options) {
  const Tensor y = torch::relu(conv->forward(x));
  if (!options.pool) return y;
  return torch::max_pool2d(y, options.pool->kernel, options.pool->step(),
                           options.pool->padding);
}

/// The layer in double precision on the CPU.
Conv2d exact_layer(Conv2d conv, const Conv2dOptions& options) {
  Conv2d exact(options);
  exact->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  exact->weight.copy_(conv->weight);
  if (conv->bias.defined()) exact->bias.copy_(conv->bias);
  return exact;
}

Conv2d device_layer(const Conv2dOptions& options) {
  Conv2d conv(options);
  conv->to(testing::device());
  return conv;
}

/// Convolutions in fp32: rounding to TF32 would let a ReLU cut other values.
class WithoutTf32 {
 public:
  WithoutTf32() : before_(at::globalContext().allowTF32CuDNN()) {
    at::globalContext().setAllowTF32CuDNN(false);
  }
  ~WithoutTf32() { at::globalContext().setAllowTF32CuDNN(before_); }

 private:
  bool before_;
};

// Numbers of filters that are multiples of 8, of 4, and of neither; no bias; strides.
TEST(ConvRelu, MatchesDoublePrecision) {
  torch::manual_seed(3);
  const WithoutTf32 exact_products;
  for (const auto& layer :
       {Conv2dOptions(3, 16, 3).padding(1), Conv2dOptions(8, 24, 3).stride(2),
        Conv2dOptions(5, 12, 2), Conv2dOptions(4, 7, 3).padding(1),
        Conv2dOptions(8, 16, 3).padding(torch::kSame),
        Conv2dOptions(8, 16, 1).bias(false),
        Conv2dOptions(8, 16, 3).groups(2).dilation(2).padding({1, 2})}) {
    for (const auto format : {at::MemoryFormat::Contiguous, kRowsFormat}) {
      for (const ConvReluOptions& options : pool_options()) {
        const Conv2d conv = device_layer(layer);
        const Tensor x = torch::randn({3, layer.in_channels(), 13, 11},
                                      on_device(torch::kFloat))
                             .contiguous(format);
        const Activated got =
            run_layer(conv, x, [&](Conv2d c, const Tensor& values) {
              return ops::conv_relu(c, values, options);
            });
        const Activated wanted = run_layer(
            exact_layer(conv, layer), x.cpu().to(torch::kDouble).contiguous(),
            [&](Conv2d c, const Tensor& v) {
              return plain_layer(c, v, options);
            });
        EXPECT_LT(relative_error(wanted.y, got.y.cpu().to(torch::kDouble)),
                  1e-5);
        for (size_t i = 0; i < wanted.gradients.size(); ++i) {
          EXPECT_LT(relative_error(wanted.gradients[i],
                                   got.gradients[i].cpu().to(torch::kDouble)),
                    testing::device().is_cuda() ? 1e-4 : 1e-5)
              << i;
        }
      }
    }
  }
}

TEST(ConvRelu, EqualsLibTorchOnTheCpu) {
  torch::manual_seed(4);
  const Conv2d conv = device_layer(Conv2dOptions(8, 16, 3).padding(1));
  const Tensor x = torch::randn({2, 8, 9, 10}, on_device(torch::kFloat));
  for (const ConvReluOptions& options : pool_options()) {
    const Activated one =
        run_layer(conv, x, [&](Conv2d c, const Tensor& values) {
          return ops::conv_relu(c, values, options);
        });
    const Activated other =
        run_layer(conv, x, [&](Conv2d c, const Tensor& values) {
          return plain_layer(c, values, options);
        });
    EXPECT_TRUE(same(one.y, other.y));
    for (size_t i = 0; i < one.gradients.size(); ++i) {
      EXPECT_TRUE(same(one.gradients[i], other.gradients[i])) << i;
    }
  }
}

TEST(ConvRelu, HalfPrecision) {
  if (!testing::device().is_cuda()) GTEST_SKIP() << "CUDA only";
  torch::manual_seed(5);
  const Conv2dOptions layer = Conv2dOptions(16, 32, 3).padding(1);
  for (const ConvReluOptions& options : pool_options()) {
    Conv2d conv = device_layer(layer);
    const torch::NoGradGuard no_grad;
    conv->weight.set_data(conv->weight.to(torch::kBFloat16));
    const Tensor x = torch::randn({2, 16, 13, 11}, on_device(torch::kFloat))
                         .to(torch::kBFloat16)
                         .contiguous(kRowsFormat);
    const Tensor y = ops::conv_relu(conv, x, options);
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(y.is_contiguous(kRowsFormat));
    const Tensor wanted = plain_layer(exact_layer(conv, layer),
                                      x.cpu().to(torch::kDouble), options);
    EXPECT_LT(relative_error(wanted, y.cpu().to(torch::kDouble)), 2e-2);
  }
}

TEST(ConvRelu, SavesInputAndResult) {
  if (!testing::device().is_cuda()) GTEST_SKIP() << "CUDA only";
  const Conv2d conv = device_layer(Conv2dOptions(8, 16, 3).padding(1));
  const Tensor x = torch::randn({2, 8, 8, 8}, on_device(torch::kFloat))
                       .contiguous(kRowsFormat)
                       .requires_grad_();
  const auto saved = [&](const ConvReluOptions& options) {
    Tensors state = conv->parameters();
    state.push_back(x);
    const KeptMeter meter(state);
    Tensor y;
    {
      const KeptMeter::Scope scope(meter, 0);
      y = ops::conv_relu(conv, x, options);
    }
    return meter.live_bytes();
  };
  EXPECT_EQ(saved({}), 2 * 16 * 8 * 8 * 4);
  EXPECT_EQ(saved({MaxPoolOptions{}}), 2 * 16 * 4 * 4);
}

}  // namespace
}  // namespace reprise
