#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/ops/conv.h>

namespace reprise {
namespace {

using testing::on_device;
using testing::relative_error;
using testing::take_gradients;
using torch::Tensor;
using torch::nn::Conv2d;
using torch::nn::Conv2dOptions;

struct ConvSize {
  int64_t samples, channels, height, width, filters, side, stride, padding;
};

// Widths that are not multiples of four, a single output, fewer than eight filters and more,
// several parts, and filters that do not cover the border of the image.
const ConvSize kConvSizes[] = {
    {2, 1, 8, 8, 8, 3, 1, 1},      {3, 1, 7, 9, 16, 3, 1, 1},
    {2, 1, 6, 8, 8, 2, 2, 0},      {2, 1, 9, 11, 5, 2, 2, 0},
    {1, 3, 12, 10, 20, 3, 2, 1},   {2, 4, 5, 6, 3, 2, 1, 1},
    {1, 1, 1, 1, 8, 3, 1, 1},      {2, 2, 2, 2, 1, 2, 2, 1},
    {2, 1, 160, 144, 16, 3, 1, 1}, {3, 3, 97, 103, 9, 3, 1, 0},
};

struct Convolved {
  Tensor y;
  Tensors gradients;
};

Conv2d make_conv(const ConvSize& size, bool bias = true) {
  Conv2d conv(Conv2dOptions(size.channels, size.filters, size.side)
                  .stride(size.stride)
                  .padding(size.padding)
                  .bias(bias));
  conv->to(testing::device());
  return conv;
}

Tensor draw_images(const ConvSize& size) {
  return torch::randn({size.samples, size.channels, size.height, size.width},
                      on_device(torch::kFloat));
}

template <class F>
Convolved run(Conv2d conv, const F& forward) {
  Convolved outcome;
  outcome.y = forward(conv);
  (outcome.y * (outcome.y.detach() + 0.5)).sum().backward();
  outcome.gradients = take_gradients(conv->parameters());
  outcome.y = outcome.y.detach();
  return outcome;
}

TEST(Conv, MatchesLibTorchInFloat64) {
  torch::manual_seed(3);
  for (const ConvSize& size : kConvSizes) {
    for (const bool bias : {true, false}) {
      const Conv2d conv = make_conv(size, bias);
      const Tensor x = draw_images(size);
      SCOPED_TRACE(::testing::Message()
                   << x.sizes() << " filters " << conv->weight.sizes()
                   << " stride " << size.stride << " bias " << bias);
      Conv2d exact = make_conv(size, bias);
      {
        const torch::NoGradGuard no_grad;
        exact->to(torch::kCPU, torch::kDouble);
        exact->weight.copy_(conv->weight);
        if (bias) exact->bias.copy_(conv->bias);
      }
      const Convolved got =
          run(conv, [&](Conv2d c) { return ops::image_conv(c, x); });
      const Convolved wanted = run(exact, [&](Conv2d c) {
        return c->forward(x.cpu().to(torch::kDouble));
      });
      EXPECT_EQ(got.y.sizes(), wanted.y.sizes());
      EXPECT_LT(relative_error(got.y.cpu().to(torch::kDouble), wanted.y), 1e-5);
      ASSERT_EQ(got.gradients.size(), bias ? 2u : 1u);
      for (size_t i = 0; i < wanted.gradients.size(); ++i) {
        EXPECT_LT(relative_error(got.gradients[i].cpu().to(torch::kDouble),
                                 wanted.gradients[i]),
                  1e-5)
            << i;
      }
    }
  }
}

TEST(Conv, UnalignedAndExpandedOutputGradients) {
  torch::manual_seed(4);
  const ConvSize size{2, 1, 8, 8, 8, 3, 1, 1};
  Conv2d conv = make_conv(size);
  const Tensor x = draw_images(size);
  const Convolved wanted =
      run(conv, [&](Conv2d c) { return ops::fallback::image_conv(c, x); });
  ops::image_conv(conv, x).sum().backward();  // one value, expanded
  const Tensors expanded = take_gradients(conv->parameters());
  conv->forward(x).sum().backward();
  const Tensors plain = take_gradients(conv->parameters());
  // Contiguous, but not aligned to 16 bytes.
  const Tensor y = ops::image_conv(conv, x);
  const Tensor shifted =
      torch::empty({y.numel() + 1}, y.options()).slice(0, 1).view(y.sizes());
  shifted.copy_(y.detach() + 0.5);
  y.backward(shifted);
  const Tensors viewed = take_gradients(conv->parameters());
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_LT(relative_error(expanded[i], plain[i]), 1e-5) << i;
    EXPECT_LT(relative_error(viewed[i], wanted.gradients[i]), 1e-5) << i;
  }
}

TEST(Conv, IsReproducible) {
  torch::manual_seed(5);
  const ConvSize size{2, 1, 300, 290, 16, 3, 1, 1};
  const Conv2d conv = make_conv(size);
  const Tensor x = draw_images(size);
  const auto once = [&](Conv2d c) { return ops::image_conv(c, x); };
  const Convolved first = run(conv, once), second = run(conv, once);
  EXPECT_TRUE(torch::equal(first.y, second.y));
  for (size_t i = 0; i < first.gradients.size(); ++i) {
    EXPECT_TRUE(torch::equal(first.gradients[i], second.gradients[i])) << i;
  }
}

TEST(Conv, UnsupportedLayersUseFallback) {
  torch::manual_seed(6);
  const ConvSize size{2, 1, 8, 8, 8, 3, 1, 1};
  Conv2d conv = make_conv(size);
  const Tensor x = draw_images(size).requires_grad_();
  ops::image_conv(conv, x).square().sum().backward();
  const Tensor got = x.grad().clone();
  x.mutable_grad().reset();
  conv->forward(x).square().sum().backward();
  EXPECT_LT(relative_error(got, x.grad()), 1e-5);

  for (const auto& options :
       {Conv2dOptions(1, 4, 5).padding(2), Conv2dOptions(1, 4, 3).stride(3),
        Conv2dOptions(1, 4, 3).dilation(2),
        Conv2dOptions(1, 4, 3).padding(torch::kSame),
        Conv2dOptions(1, 4, 3).padding(1).padding_mode(torch::kCircular),
        Conv2dOptions(1, 4, {3, 2}), Conv2dOptions(1, 4, 3).padding({1, 0})}) {
    Conv2d other(options);
    other->to(testing::device());
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(ops::image_conv(other, x.detach()),
                             ops::fallback::image_conv(other, x.detach())));
  }
  EXPECT_THROW(
      (void)ops::image_conv(conv, torch::zeros({1, 2, 8, 8}, on_device())),
      std::exception);
}

TEST(Conv, SavesOnlyImages) {
  const ConvSize size{2, 1, 16, 16, 8, 3, 1, 1};
  const Conv2d conv = make_conv(size);
  const Tensor x = draw_images(size);
  const KeptMeter meter(conv->parameters());
  Tensor y;
  {
    const KeptMeter::Scope scope(meter, 0);
    y = ops::image_conv(conv, x);
  }
  EXPECT_EQ(meter.live_bytes(), static_cast<int64_t>(x.nbytes()));
}

}  // namespace
}  // namespace reprise
