#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/ops/attention.h>

#include <cmath>

namespace reprise {
namespace {

using torch::Tensor;

struct Case {
  Tensor q, k, v;  // (2, 3, T, 4)
};

Case make_case(int64_t queries, int64_t keys) {
  const auto make = [](int64_t length) {
    return torch::randn({2, 3, length, 4}, testing::on_device())
        .requires_grad_();
  };
  return {make(queries), make(keys), make(keys)};
}

/// Compares with softmax(q kᵀ / √D + added) v, computed element by element in float64.
void expect_like_by_hand(const Case& given, const Tensor& got,
                         const Tensor& allowed, const Tensor& added) {
  const auto plain = [](const Tensor& t, int64_t n, int64_t h) {
    return t.detach().cpu().to(torch::kDouble)[n][h];
  };
  for (int64_t n = 0; n < 2; ++n) {
    for (int64_t h = 0; h < 3; ++h) {
      const Tensor q = plain(given.q, n, h);
      Tensor out = torch::zeros_like(q);
      const Tensor k = plain(given.k, n, h);
      const Tensor v = plain(given.v, n, h);
      for (int64_t t = 0; t < q.size(0); ++t) {
        double total = 0;
        for (int64_t s = 0; s < k.size(0); ++s) {
          if (!allowed[t][s].item<bool>()) continue;
          const double weight =
              std::exp((q[t] * k[s]).sum().item<double>() / 2 +
                       added[t][s].item<double>());
          out[t] += weight * v[s];
          total += weight;
        }
        out[t] /= total;
      }
      EXPECT_LT((plain(got, n, h) - out).abs().max().item<double>(), 1e-5);
    }
  }
}

TEST(Attention, MatchesDefinitionWithAndWithoutMask) {
  const auto given = make_case(5, 5);
  const Tensor all = torch::ones({5, 5}, torch::kBool);
  const Tensor zero = torch::zeros({5, 5});
  expect_like_by_hand(given, ops::attention(given.q, given.k, given.v), all,
                      zero);

  ops::AttentionOptions causal;
  causal.causal = true;
  const Tensor causal_out = ops::attention(given.q, given.k, given.v, causal);
  expect_like_by_hand(given, causal_out, all.tril(), zero);
  EXPECT_FALSE(causal_out.isnan().any().item<bool>());

  ops::AttentionOptions masked;
  const Tensor some =
      torch::rand({5, 5}).gt(0.4).logical_or(torch::eye(5).to(torch::kBool));
  masked.mask = some.to(testing::device());
  expect_like_by_hand(given, ops::attention(given.q, given.k, given.v, masked),
                      some, zero);
  const Tensor added = torch::randn({5, 5});
  masked.mask = added.to(testing::device());
  expect_like_by_hand(given, ops::attention(given.q, given.k, given.v, masked),
                      all, added);
}

TEST(Attention, GradientsWithOtherNumberOfKeys) {
  const auto given = make_case(2, 7);
  const Tensor out = ops::attention(given.q, given.k, given.v);
  expect_like_by_hand(given, out, torch::ones({2, 7}, torch::kBool),
                      torch::zeros({2, 7}));
  out.square().sum().backward();
  // Finite differences along the gradient.
  const auto value = [&](double step) {
    const torch::NoGradGuard no_grad;
    const auto moved = [&](const Tensor& t) {
      return t.to(torch::kDouble) + step * t.grad().to(torch::kDouble);
    };
    return ops::attention(moved(given.q), moved(given.k), moved(given.v))
        .square()
        .sum()
        .item<double>();
  };
  double slope = 0;
  for (const Tensor& t : {given.q, given.k, given.v}) {
    slope += t.grad().to(torch::kDouble).square().sum().item<double>();
  }
  constexpr double kStep = 1e-5;
  EXPECT_NEAR((value(kStep) - value(-kStep)) / (2 * kStep) / slope, 1, 1e-4);
}

TEST(Attention, DropoutPreservesMean) {
  auto given = make_case(4, 64);
  const Tensor ones = torch::ones_like(given.v);
  ops::AttentionOptions options;
  options.dropout = 0.5;
  torch::manual_seed(1);
  const Tensor a = ops::attention(given.q, given.k, ones, options);
  torch::manual_seed(1);
  EXPECT_TRUE(
      testing::same(a, ops::attention(given.q, given.k, ones, options)));
  EXPECT_FALSE(
      testing::same(a, ops::attention(given.q, given.k, ones, options)));
  EXPECT_NEAR(a.mean().item<double>(), 1, 0.2);
}

TEST(Attention, MatchesFallback) {
  const auto given = make_case(6, 6);
  ops::AttentionOptions causal;
  causal.causal = true;
  ops::AttentionOptions masked;
  masked.mask = torch::randn({6, 6}, testing::on_device());
  for (const auto& options : {ops::AttentionOptions{}, causal, masked}) {
    const Tensor wanted =
        ops::fallback::attention(given.q, given.k, given.v, options);
    wanted.square().sum().backward();
    const auto gradients = testing::take_gradients({given.q, given.k, given.v});
    const Tensor got = ops::attention(given.q, given.k, given.v, options);
    got.square().sum().backward();
    EXPECT_LT(testing::relative_error(got, wanted), 1e-5);
    EXPECT_LT(testing::relative_error(given.q.grad(), gradients[0]), 1e-4);
    EXPECT_LT(testing::relative_error(given.v.grad(), gradients[2]), 1e-4);
    testing::take_gradients({given.q, given.k, given.v});
  }
}

/// q (2, 6, T, 4) and k, v (2, heads, S, 4).
Case make_grouped_case(int64_t heads, int64_t queries, int64_t keys,
                       torch::ScalarType type = torch::kFloat) {
  torch::manual_seed(8);
  const auto make = [&](int64_t count, int64_t length) {
    return torch::randn({2, count, length, 4}, testing::on_device())
        .to(type)
        .requires_grad_();
  };
  return {make(6, queries), make(heads, keys), make(heads, keys)};
}

TEST(Attention, GroupsMatchRepeatedKeysAndValues) {
  for (const int64_t heads : {1, 2, 3}) {
    for (const auto& [queries, keys] : {std::pair(5, 5), std::pair(3, 7)}) {
      const auto given = make_grouped_case(heads, queries, keys);
      ops::AttentionOptions causal;
      causal.causal = queries == keys;
      ops::AttentionOptions masked;
      masked.mask = torch::randn({queries, keys}, testing::on_device());
      for (const auto& options : {ops::AttentionOptions{}, causal, masked}) {
        const auto repeat = [&](const Tensor& t) {
          return t.repeat_interleave(6 / heads, 1);
        };
        const Tensor wanted = ops::fallback::attention(
            given.q, repeat(given.k), repeat(given.v), options);
        wanted.square().sum().backward();
        const auto expected =
            testing::take_gradients({given.q, given.k, given.v});
        for (const auto run : {ops::attention, ops::fallback::attention}) {
          const Tensor got = run(given.q, given.k, given.v, options);
          EXPECT_EQ(got.sizes(), given.q.sizes());
          got.square().sum().backward();
          EXPECT_LT(testing::relative_error(wanted, got), 1e-6);
          const auto gradients =
              testing::take_gradients({given.q, given.k, given.v});
          for (size_t i = 0; i < 3; ++i) {
            EXPECT_LT(testing::relative_error(expected[i], gradients[i]), 1e-5)
                << heads << " " << i;
          }
        }
      }
    }
  }
}

TEST(Attention, GroupsInHalfPrecision) {
  // On the CPU LibTorch 1.13 has no matrix products of float16.
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    if (type == torch::kHalf && testing::device().is_cpu()) continue;
    const auto given = make_grouped_case(2, 5, 5, type);
    ops::AttentionOptions causal;
    causal.causal = true;
    const Tensor got = ops::attention(given.q, given.k, given.v, causal);
    got.sum().backward();
    EXPECT_EQ(got.scalar_type(), type);
    const auto gradients = testing::take_gradients({given.q, given.k, given.v});
    const auto wide = [](const Tensor& t) {
      return t.detach().to(torch::kDouble).requires_grad_();
    };
    const Case exact = {wide(given.q), wide(given.k), wide(given.v)};
    const Tensor wanted =
        ops::fallback::attention(exact.q, exact.k.repeat_interleave(3, 1),
                                 exact.v.repeat_interleave(3, 1), causal);
    wanted.sum().backward();
    EXPECT_LT(testing::relative_error(wanted, got.to(torch::kDouble)), 2e-2);
    EXPECT_LT(testing::relative_error(exact.v.grad(),
                                      gradients[2].to(torch::kDouble)),
              3e-2);
  }
}

TEST(Attention, GroupsDoNotSaveRepeatedKeys) {
  if (!testing::device().is_cpu()) GTEST_SKIP() << "depends on the kernel";
  constexpr int64_t kLength = 4, kChannels = 512;
  const auto make = [&](int64_t heads) {
    return torch::randn({1, heads, kLength, kChannels}).requires_grad_();
  };
  const Tensor q = make(8), k = make(2), v = make(2);
  KeptMeter kept;
  const KeptMeter::Scope scope(kept, 0);
  const Tensor y = ops::fallback::attention(q * 1, k * 1, v * 1);
  // The scaled queries, keys, values and the attention weights.
  EXPECT_EQ(kept.live_bytes(),
            4 * kLength * ((8 + 2 + 2) * kChannels + 8 * kLength));
}

TEST(Attention, RejectsHeadsThatDoNotFit) {
  const auto given = make_grouped_case(4, 3, 3);
  for (const auto run : {ops::attention, ops::fallback::attention}) {
    const std::string text =
        testing::error_of([&] { run(given.q, given.k, given.v, {}); });
    EXPECT_NE(text.find("H a multiple of G, got [2, 6, 3, 4], [2, 4, 3, 4]"),
              std::string::npos)
        << text;
  }
}

TEST(Attention, RejectsMaskWithCausal) {
  const auto given = make_case(3, 3);
  ops::AttentionOptions options;
  options.causal = true;
  options.mask = torch::ones({3, 3}, testing::on_device(torch::kBool));
  EXPECT_NE(testing::error_of([&] {
              ops::attention(given.q, given.k, given.v, options);
            }).find("got both"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
