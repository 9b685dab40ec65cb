#include "compat/autocast.h"
#include "support.h"

#include <reprise/ops/norm.h>

#include <torch/autograd.h>
#include <torch/nn/modules/normalization.h>

namespace reprise {
namespace {

using testing::on_device;
using testing::relative_error;
using testing::same;
using testing::take_gradients;
using torch::Tensor;

struct AddCase {
  std::vector<int64_t> sizes;
  torch::ScalarType branch;
  bool adds, uses_sum;
};

// Several parts and less than one, and numbers of columns that do not fill a block.
const AddCase kAddCases[] = {
    {{3, 70, 768}, torch::kBFloat16, true, true},
    {{2, 5, 64}, torch::kFloat, true, true},
    {{130, 132}, torch::kHalf, true, false},
    {{4, 33, 40}, torch::kFloat, false, true},
    {{2, 9, 1600}, torch::kBFloat16, false, false},
    {{5, 700, 64}, torch::kBFloat16, true, true},
    {{3, 4096}, torch::kFloat, true, true},
    {{1000, 1280}, torch::kHalf, true, true},
    {{3, 8192}, torch::kBFloat16, true, true},
};

struct Added {
  Tensor sum, normalized;
  Tensors gradients;
};

Added run(const AddCase& c, bool fused, bool autocast,
          torch::nn::LayerNorm norm) {
  torch::manual_seed(2);
  const Tensor x =
      torch::randn(c.sizes, on_device(torch::kFloat)).add_(3).requires_grad_();
  const Tensor branch = torch::randn(c.sizes, on_device(torch::kFloat))
                            .to(c.branch)
                            .requires_grad_();
  compat::AutocastState state;
  (x.is_cuda() ? state.cuda_enabled : state.cpu_enabled) = autocast;
  state.cuda_dtype = state.cpu_dtype = torch::kBFloat16;
  ops::AddNormResult made;
  {
    const compat::AutocastGuard guard(state);
    const Tensor from = x * 1;
    const Tensor added = c.adds ? branch : Tensor();
    made = fused ? ops::add_norm(from, added, norm)
                 : ops::fallback::add_norm(from, added, norm);
  }
  Tensor loss = (made.normalized.to(torch::kFloat).sin() * 2).sum();
  if (c.uses_sum) loss = loss + made.sum.cos().sum();
  loss.backward();
  Tensors of = {x, norm->weight, norm->bias};
  if (c.adds) of.push_back(branch);
  return {made.sum.detach(), made.normalized.detach(), take_gradients(of)};
}

torch::nn::LayerNorm make_norm(int64_t width) {
  torch::manual_seed(1);
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({width}));
  norm->to(testing::device());
  const torch::NoGradGuard no_grad;
  norm->weight.normal_();
  norm->bias.normal_();
  return norm;
}

TEST(AddNorm, MatchesFallback) {
  for (const AddCase& c : kAddCases) {
    for (const bool autocast : {false, true}) {
      SCOPED_TRACE(::testing::Message()
                   << torch::IntArrayRef(c.sizes) << " autocast " << autocast);
      const auto norm = make_norm(c.sizes.back());
      const Added wanted = run(c, false, autocast, norm);
      const Added got = run(c, true, autocast, norm);
      const bool rounds = got.normalized.element_size() == 2;
      EXPECT_EQ(rounds, autocast && testing::device().is_cuda());
      EXPECT_TRUE(same(got.sum, wanted.sum));
      EXPECT_LT(
          relative_error(got.normalized.to(torch::kFloat), wanted.normalized),
          rounds ? 5e-3 : 1e-6);
      for (size_t i = 0; i < wanted.gradients.size(); ++i) {
        ASSERT_TRUE(got.gradients[i].defined()) << i;
        EXPECT_EQ(got.gradients[i].scalar_type(),
                  wanted.gradients[i].scalar_type());
        const bool half = rounds || wanted.gradients[i].element_size() == 2;
        EXPECT_LT(relative_error(got.gradients[i].to(torch::kFloat),
                                 wanted.gradients[i].to(torch::kFloat)),
                  half ? 8e-3 : 1e-5)
            << i;
      }
      const Added again = run(c, true, autocast, norm);
      for (size_t i = 0; i < got.gradients.size(); ++i) {
        EXPECT_TRUE(same(got.gradients[i], again.gradients[i])) << i;
      }
    }
  }
}

TEST(AddNorm, HalfPrecisionStreams) {
  if (!testing::device().is_cuda()) GTEST_SKIP() << "only the kernel has them";
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    auto norm = make_norm(768);
    const auto options = on_device(torch::kFloat);
    const Tensor x = torch::randn({70, 768}, options).to(type).requires_grad_();
    const Tensor branch =
        torch::randn({70, 768}, options).to(type).requires_grad_();
    const Tensor slope = torch::randn({70, 768}, options).to(type);
    const auto got = ops::add_norm(x * 1, branch * 1, norm);
    EXPECT_EQ(got.sum.scalar_type(), type);
    EXPECT_EQ(got.normalized.scalar_type(), type);
    torch::autograd::backward({got.sum, got.normalized}, {slope, slope});
    const Tensors gradients =
        take_gradients({x, branch, norm->weight, norm->bias});
    // The same in float32.
    const Tensor wide = (x + branch).detach().to(torch::kFloat);
    const Tensor sum = wide.requires_grad_();
    const Tensor normalized = norm->forward(sum);
    normalized.backward(slope.to(torch::kFloat));
    EXPECT_TRUE(same(got.sum.detach().to(torch::kFloat), wide.detach()));
    EXPECT_LT(relative_error(normalized.detach(),
                             got.normalized.detach().to(torch::kFloat)),
              5e-3);
    const Tensor dx = sum.grad() + slope.to(torch::kFloat);
    EXPECT_LT(relative_error(dx, gradients[0].to(torch::kFloat)), 5e-3);
    EXPECT_TRUE(same(gradients[0], gradients[1]));
    EXPECT_LT(relative_error(norm->weight.grad(), gradients[2]), 1e-4);
    EXPECT_LT(relative_error(norm->bias.grad(), gradients[3]), 1e-4);
    norm->zero_grad();
  }
}

TEST(AddNorm, BackwardFromSumOnly) {
  const auto norm = make_norm(64);
  const Tensor x =
      torch::randn({6, 64}, on_device(torch::kFloat)).requires_grad_();
  const Tensor branch =
      torch::randn({6, 64}, on_device(torch::kFloat)).requires_grad_();
  ops::add_norm(x * 1, branch * 1, norm).sum.sum().backward();
  EXPECT_TRUE(x.grad().eq(1).all().item<bool>());
  EXPECT_TRUE(branch.grad().eq(1).all().item<bool>());
  EXPECT_FALSE(norm->weight.grad().defined());
}

TEST(AddNorm, FallbackIsLibTorchsLayerNorm) {
  const auto norm = make_norm(8);
  const Tensor x = torch::randn({3, 8}, on_device(torch::kFloat));
  const Tensor branch = torch::randn({3, 8}, on_device(torch::kFloat));
  const auto both = ops::fallback::add_norm(x, branch, norm);
  EXPECT_TRUE(same(both.sum, x + branch));
  EXPECT_TRUE(same(both.normalized,
                   torch::layer_norm(x + branch, {8}, norm->weight, norm->bias,
                                     norm->options.eps())));
  EXPECT_TRUE(same(ops::fallback::add_norm(x, {}, norm).sum, x));
}

TEST(PostNorm, GivesBothTypesAndAddsTheirGradients) {
  for (const bool autocast : {false, true}) {
    for (const bool adds : {false, true}) {
      torch::manual_seed(5);
      const int64_t width = 768;
      torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({width}));
      norm->to(testing::device());
      {
        const torch::NoGradGuard no_grad;
        norm->weight.add_(torch::randn_like(norm->weight), 0.3);
        norm->bias.add_(torch::randn_like(norm->bias), 0.3);
      }
      const Tensor x =
          torch::randn({3, 37, width}, on_device()).requires_grad_();
      const Tensor branch = torch::randn({3, 37, width}, on_device())
                                .to(autocast ? torch::kBFloat16 : torch::kFloat)
                                .requires_grad_();
      // Exact in half precision, so that both runs see the same gradient.
      const Tensor d_stream = torch::randn({3, 37, width}, on_device());
      const Tensor d_rounded =
          torch::randn({3, 37, width}, on_device()).to(torch::kBFloat16);
      compat::AutocastState state;
      (x.is_cuda() ? state.cuda_enabled : state.cpu_enabled) = autocast;
      state.cuda_dtype = state.cpu_dtype = torch::kBFloat16;
      ops::PostNormResult made;
      {
        const compat::AutocastGuard guard(state);
        made = ops::post_norm(x * 1, adds ? branch : Tensor(), norm);
      }
      EXPECT_EQ(made.stream.scalar_type(), torch::kFloat);
      const Tensor objective =
          (made.stream * d_stream).sum() +
          (made.rounded.to(torch::kFloat) * d_rounded.to(torch::kFloat)).sum();
      objective.backward();

      const auto wide = [](const Tensor& t) {
        return t.detach().to(torch::kDouble).requires_grad_();
      };
      const Tensor x64 = wide(x), b64 = wide(branch), w64 = wide(norm->weight),
                   bias64 = wide(norm->bias);
      const Tensor sum = adds ? x64 + b64 : x64 * 1;
      const Tensor exact = torch::layer_norm(sum, {width}, w64, bias64, 1e-5);
      const Tensor both =
          d_stream.to(torch::kDouble) + d_rounded.to(torch::kDouble);
      (exact * both).sum().backward();
      EXPECT_LT(relative_error(made.stream.detach(), exact.detach()), 1e-6);
      EXPECT_LT(relative_error(made.rounded.detach(), exact.detach()),
                autocast ? 4e-3 : 1e-6);
      EXPECT_LT(relative_error(x.grad(), x64.grad()), 2e-6);
      EXPECT_LT(relative_error(norm->weight.grad(), w64.grad()), 2e-6);
      EXPECT_LT(relative_error(norm->bias.grad(), bias64.grad()), 2e-6);
      if (adds) {
        EXPECT_LT(relative_error(branch.grad(), b64.grad()),
                  autocast ? 4e-3 : 2e-6);
      }
    }
  }
}

TEST(PostNorm, OneOfTheResultsMayBeUnused) {
  for (const bool first : {true, false}) {
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({64}));
    norm->to(testing::device());
    const Tensor x = torch::randn({5, 64}, on_device()).requires_grad_();
    compat::AutocastState state;
    (x.is_cuda() ? state.cuda_enabled : state.cpu_enabled) = true;
    state.cuda_dtype = state.cpu_dtype = torch::kBFloat16;
    const compat::AutocastGuard guard(state);
    const auto made = ops::post_norm(x * 1, {}, norm);
    const Tensor d = torch::randn({5, 64}, on_device()).to(torch::kBFloat16);
    ((first ? made.stream : made.rounded).to(torch::kFloat) *
     d.to(torch::kFloat))
        .sum()
        .backward();
    const Tensor x64 = x.detach().to(torch::kDouble).requires_grad_();
    (torch::layer_norm(x64, {64}, {}, {}, 1e-5) * d.to(torch::kDouble))
        .sum()
        .backward();
    EXPECT_LT(relative_error(x.grad(), x64.grad()), 2e-6) << first;
  }
}

}  // namespace
}  // namespace reprise
