#include "linear_layer.h"
#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/norm.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/autograd.h>

#include <cmath>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::on_device;
using testing::relative_error;
using testing::same;
using torch::Tensor;

struct NormCase {
  Tensor x, weight, dy;
};

NormCase make_norm_case(std::vector<int64_t> sizes, torch::ScalarType type,
                        torch::ScalarType weight_type) {
  torch::manual_seed(3);
  NormCase made;
  made.x = torch::randn(sizes, on_device()).to(type).requires_grad_();
  made.weight = (torch::randn({sizes.back()}, on_device()) + 1)
                    .to(weight_type)
                    .requires_grad_();
  made.dy = torch::randn(sizes, on_device())
                .to(torch::promote_types(type, weight_type));
  return made;
}

/// Value and gradients of `run` on `given`.
std::vector<Tensor> norm_results(const NormCase& given, auto&& run) {
  const Tensor y = run(given.x, given.weight, 1e-5);
  y.backward(given.dy);
  auto results = testing::take_gradients({given.x, given.weight});
  results.push_back(y.detach());
  return results;
}

TEST(RmsNorm, MatchesFallbackInAllTypes) {
  const std::vector<std::vector<int64_t>> shapes = {
      {2, 3, 8}, {5, 33}, {1, 1, 1}, {7}, {3, 2, 5, 17}, {0, 4}, {9, 1536}};
  for (const auto& sizes : shapes) {
    for (const auto type :
         {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      for (const auto weight_type : {type, torch::kFloat}) {
        if (type == torch::kDouble && weight_type != type) continue;
        const auto given = make_norm_case(sizes, type, weight_type);
        const auto wanted = norm_results(given, ops::fallback::rms_norm);
        const auto got = norm_results(given, ops::rms_norm);
        // Without the kernel, the result is computed alike; gradients have another order of
        // additions.
        EXPECT_EQ(got[2].scalar_type(), wanted[2].scalar_type());
        EXPECT_EQ(got[2].sizes(), c10::IntArrayRef(sizes));
        if (!device().is_cuda()) {
          EXPECT_TRUE(same(got[2], wanted[2])) << type << " " << weight_type;
        }
        const double rounding = type == torch::kDouble  ? 1e-12
                                : type == torch::kFloat ? 2e-6
                                : type == torch::kHalf  ? 4e-3
                                                        : 3e-2;
        for (size_t i = 0; i < 3; ++i) {
          EXPECT_EQ(got[i].scalar_type(), wanted[i].scalar_type());
          if (given.x.numel() == 0) {
            EXPECT_TRUE(same(wanted[i], got[i]));
            continue;
          }
          // With one channel the exact gradient of x is almost 0.
          if (sizes.back() == 1 && i == 0) continue;
          EXPECT_LE(relative_error(wanted[i], got[i]), rounding)
              << type << " " << weight_type << " " << i;
        }
      }
    }
  }
}

struct AddRmsCase {
  std::vector<int64_t> sizes;
  torch::ScalarType x, branch;
  bool adds, uses_sum;
};

// One and several rows per block, widths that do not fill it, and one without a kernel.
const AddRmsCase kAddRmsCases[] = {
    {{2, 70, 1536}, torch::kFloat, torch::kBFloat16, true, true},
    {{3, 5, 64}, torch::kFloat, torch::kFloat, true, false},
    {{130, 132}, torch::kFloat, torch::kHalf, true, true},
    {{2, 9, 2048}, torch::kFloat, torch::kBFloat16, false, true},
    {{3, 8192}, torch::kFloat, torch::kBFloat16, true, true},
    {{600, 896}, torch::kBFloat16, torch::kBFloat16, true, true},
    {{4, 3584}, torch::kHalf, torch::kHalf, false, true},
    {{5, 7}, torch::kFloat, torch::kFloat, true, true},
};

/// {sum, normalized, gradients of x, weight and branch} of `run`, as float64.
std::vector<Tensor> add_rms_results(const AddRmsCase& c,
                                    torch::ScalarType as_type, auto&& run) {
  torch::manual_seed(7);
  const auto make = [&](torch::ScalarType type) {
    const Tensor values = torch::randn(c.sizes, on_device()).to(type);
    return (as_type == torch::kDouble ? values.to(as_type) : values)
        .requires_grad_();
  };
  const Tensor x = make(c.x), branch = make(c.branch);
  Tensor weight = torch::randn({c.sizes.back()}, on_device()) + 1;
  if (as_type == torch::kDouble) weight = weight.to(as_type);
  weight.requires_grad_();
  const Tensor slope = torch::randn(c.sizes, on_device());
  const ops::AddNormResult made =
      run(x * 1, c.adds ? branch * 1 : Tensor(), weight);
  Tensor loss = (made.normalized.to(torch::kDouble) * slope).sum();
  if (c.uses_sum) loss = loss + (made.sum.to(torch::kDouble) * slope).sum();
  loss.backward();
  std::vector<Tensor> results = {made.sum, made.normalized, x.grad(),
                                 weight.grad()};
  if (c.adds) results.push_back(branch.grad());
  for (Tensor& result : results) result = result.detach().to(torch::kDouble);
  return results;
}

TEST(RmsNorm, OfASumMatchesFloat64) {
  for (const AddRmsCase& c : kAddRmsCases) {
    for (const bool autocast : {false, true}) {
      SCOPED_TRACE(::testing::Message()
                   << torch::IntArrayRef(c.sizes) << " autocast " << autocast);
      const auto fused = [&](const Tensor& x, const Tensor& branch,
                             const Tensor& weight) {
        const compat::AutocastGuard guard(autocast ? testing::half()
                                                   : compat::AutocastState{});
        const auto made = ops::add_rms_norm(x, branch, weight, 1e-5);
        EXPECT_EQ(made.sum.scalar_type(), c.x);
        EXPECT_EQ(made.normalized.scalar_type(),
                  autocast && device().is_cuda() && c.sizes.back() % 4 == 0
                      ? torch::kBFloat16
                      : torch::kFloat);
        return made;
      };
      const auto wanted = add_rms_results(
          c, torch::kDouble,
          [](const Tensor& x, const Tensor& branch, const Tensor& weight) {
            return ops::fallback::add_rms_norm(x, branch, weight, 1e-5);
          });
      const auto got = add_rms_results(c, c.x, fused);
      const auto again = add_rms_results(c, c.x, fused);
      const bool half = autocast || c.x != torch::kFloat;
      for (size_t i = 0; i < wanted.size(); ++i) {
        const bool rounds = half || (i == 4 && c.branch != torch::kFloat);
        EXPECT_LE(relative_error(wanted[i], got[i]), rounds ? 1e-2 : 2e-6) << i;
        EXPECT_TRUE(same(got[i], again[i])) << i;
      }
    }
  }
}

TEST(RmsNorm, OfASumSavesItAndOneValuePerRow) {
  const Tensor leaf = torch::randn({64, 128}, on_device()).requires_grad_();
  const Tensor weight = torch::ones({128}, on_device()).requires_grad_();
  const std::vector<Tensor> state = {weight};
  KeptMeter kept(state);
  const Tensor x = leaf * 1, branch = leaf * 2;
  const KeptMeter::Scope scope(kept, 0);
  const auto made = ops::add_rms_norm(x, branch, weight, 1e-5);
  EXPECT_EQ(kept.live_bytes(), allocated_bytes(leaf.numel() * 4, device()) +
                                   allocated_bytes(64 * 4, device()));
}

TEST(RmsNorm, MatchesDefinition) {
  const auto given = make_norm_case({3, 5}, torch::kFloat, torch::kFloat);
  const Tensor y = ops::rms_norm(given.x, given.weight, 0.25).detach().cpu();
  const Tensor x = given.x.detach().cpu(), w = given.weight.detach().cpu();
  for (int64_t n = 0; n < 3; ++n) {
    double squares = 0;
    for (int64_t i = 0; i < 5; ++i) {
      squares += std::pow(x[n][i].item<double>(), 2);
    }
    for (int64_t i = 0; i < 5; ++i) {
      EXPECT_NEAR(y[n][i].item<double>(),
                  x[n][i].item<double>() / std::sqrt(squares / 5 + 0.25) *
                      w[i].item<double>(),
                  1e-6);
    }
  }
}

TEST(RmsNorm, HalfPrecisionHasFloat32Statistics) {
  // In float16 the squares, and in bfloat16 their sum, would be far off.
  for (const auto type : {torch::kHalf, torch::kBFloat16}) {
    const Tensor x = torch::full({2, 1000}, 300, on_device(type));
    const Tensor weight = torch::ones({1000}, on_device(type));
    const Tensor y = ops::rms_norm(x, weight, 1e-6);
    EXPECT_EQ(y.scalar_type(), type);
    EXPECT_EQ(y.to(torch::kFloat).sub(1).abs().max().item<double>(), 0) << type;
  }
}

TEST(RmsNorm, MatchesFiniteDifferences) {
  auto given = make_norm_case({4, 6}, torch::kDouble, torch::kDouble);
  const auto value = [&](const Tensor& x, const Tensor& weight) {
    return ops::rms_norm(x, weight, 1e-3).pow(3).sum();
  };
  value(given.x, given.weight).backward();
  constexpr double kStep = 1e-6;
  const torch::NoGradGuard no_grad;
  for (const Tensor& leaf : {given.x, given.weight}) {
    Tensor flat = leaf.detach().view({-1});
    for (int64_t i = 0; i < flat.numel(); ++i) {
      const double before = flat[i].item<double>();
      flat[i] = before + kStep;
      const double above = value(given.x, given.weight).item<double>();
      flat[i] = before - kStep;
      const double below = value(given.x, given.weight).item<double>();
      flat[i] = before;
      const double slope = (above - below) / (2 * kStep);
      EXPECT_NEAR(slope, leaf.grad().view({-1})[i].item<double>(),
                  1e-6 * std::max(1., std::abs(slope)));
    }
  }
}

TEST(RmsNorm, SavesInputAndOneValuePerRow) {
  for (const auto type : {torch::kFloat, torch::kBFloat16}) {
    const Tensor leaf =
        torch::randn({64, 128}, on_device(type)).requires_grad_();
    const Tensor weight = torch::ones({128}, on_device(type)).requires_grad_();
    const auto kept_by = [&](auto&& run) {
      const std::vector<Tensor> state = {weight};
      KeptMeter kept(state);
      const Tensor x = leaf * 1;
      const KeptMeter::Scope scope(kept, 0);
      const Tensor y = run(x, weight, 1e-5);
      return kept.live_bytes();
    };
    const int64_t input = allocated_bytes(
        leaf.numel() * static_cast<int64_t>(leaf.element_size()), device());
    const int64_t got = kept_by(ops::rms_norm);
    EXPECT_EQ(got, input + allocated_bytes(64 * 4, device()));
    EXPECT_GE(kept_by(ops::fallback::rms_norm), 2 * input);
  }
}

TEST(RmsNorm, GradientsThatAreNotNeeded) {
  auto given = make_norm_case({3, 4}, torch::kFloat, torch::kFloat);
  const auto wanted = norm_results(given, ops::rms_norm);
  const Tensor frozen = given.weight.detach();
  ops::rms_norm(given.x, frozen, 1e-5).backward(given.dy);
  EXPECT_TRUE(same(given.x.grad(), wanted[0]));
  ops::rms_norm(given.x.detach(), given.weight, 1e-5).backward(given.dy);
  EXPECT_TRUE(same(given.weight.grad(), wanted[1]));
}

TEST(RmsNorm, UnderAutocastAndCheckpoint) {
  const auto given = make_norm_case({4, 24}, torch::kFloat, torch::kFloat);
  const auto wanted = norm_results(given, ops::rms_norm);
  const auto cast =
      norm_results(given, [](const Tensor& x, const Tensor& w, double eps) {
        const compat::AutocastGuard guard(testing::half());
        return ops::rms_norm(x, w, eps);
      });
  const auto again =
      norm_results(given, [](const Tensor& x, const Tensor& w, double eps) {
        return checkpoint(
            [eps](const Tensor& a, const Tensor& b) {
              return ops::rms_norm(a, b, eps);
            },
            x, w);
      });
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(same(wanted[i], cast[i])) << i;
    EXPECT_TRUE(same(wanted[i], again[i])) << i;
  }
}

TEST(RmsNorm, Errors) {
  const Tensor x = torch::randn({2, 4}, on_device()).requires_grad_();
  const Tensor weight = torch::ones({4}, on_device());
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(error_of([&] { ops::rms_norm(x, weight[0], 1e-5); }),
                  "[rms_norm] expected x (…, D) and weight (D), got [2, 4]"));
  EXPECT_TRUE(has(
      error_of([&] { ops::rms_norm(x, torch::ones({5}, on_device()), 1e-5); }),
      "and [5]"));
  EXPECT_TRUE(has(error_of([&] { ops::rms_norm(x, weight, -1); }), "got -1"));
  const Tensor sum = ops::rms_norm(x, weight, 1e-5).sum();
  EXPECT_TRUE(
      has(error_of([&] { torch::autograd::grad({sum}, {x}, {}, true, true); }),
          "[rms_norm] has no second derivative"));
}

}  // namespace
}  // namespace reprise
