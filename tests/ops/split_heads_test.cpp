#include "linear_layer.h"
#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/attention.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/autograd.h>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::on_device;
using testing::relative_error;
using testing::same;
using torch::Tensor;

struct HeadsCase {
  int64_t samples, positions, heads, kv_heads, dim;
  bool rotates, per_sample;
};

// With and without the kernel, which needs a multiple of 8 or 16 channels.
const HeadsCase kHeadsCases[] = {
    {2, 5, 3, 1, 16, true, false},  {1, 7, 4, 2, 64, true, false},
    {3, 4, 6, 6, 32, false, false}, {2, 9, 8, 2, 128, true, true},
    {2, 3, 2, 1, 6, true, false},   {1, 1, 1, 1, 8, true, true},
};

struct HeadsInputs {
  Tensor qkv, cos, sin;
  Tensors slopes;  ///< gradients of q, k and v
};

HeadsInputs make_heads_inputs(const HeadsCase& c, torch::ScalarType type) {
  torch::manual_seed(8);
  HeadsInputs made;
  const int64_t row = (c.heads + 2 * c.kv_heads) * c.dim;
  made.qkv = torch::randn({c.samples, c.positions, row}, on_device())
                 .to(type)
                 .requires_grad_();
  if (c.rotates) {
    std::vector<int64_t> sizes = {c.positions, c.dim / 2};
    if (c.per_sample) sizes.insert(sizes.begin(), {c.samples, 1});
    const Tensor angles = torch::randn(sizes, on_device()) * 3;
    made.cos = angles.cos();
    made.sin = angles.sin();
  }
  for (const int64_t heads : {c.heads, c.kv_heads, c.kv_heads}) {
    made.slopes.push_back(
        torch::randn({c.samples, heads, c.positions, c.dim}, on_device())
            .to(type));
  }
  return made;
}

/// q, k, v and the gradient of qkv.
Tensors heads_results(const HeadsCase& c, const HeadsInputs& given,
                      auto&& split) {
  const ops::QueryKeyValue made =
      split(given.qkv * 1, c.heads, c.kv_heads, given.cos, given.sin);
  Tensors results = {made.q.detach().clone(), made.k.detach().clone(),
                     made.v.detach().clone()};
  torch::autograd::backward({made.q, made.k, made.v}, given.slopes);
  results.push_back(testing::take_gradients({given.qkv})[0]);
  return results;
}

/// The definition in float64, head by head.
Tensors exact_heads(const HeadsCase& c, const HeadsInputs& given) {
  const Tensor x = given.qkv.detach().to(torch::kDouble).requires_grad_();
  const auto turn = [&](const Tensor& t) {
    if (!c.rotates) return t;
    const auto halves = t.chunk(2, -1);
    const Tensor cos = given.cos.to(torch::kDouble);
    const Tensor sin = given.sin.to(torch::kDouble);
    return torch::cat(
        {halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin},
        -1);
  };
  const auto pick = [&](int64_t first, int64_t count, bool rotates) {
    Tensors all;
    for (int64_t i = first; i < first + count; ++i) {
      all.push_back(x.narrow(-1, i * c.dim, c.dim));
    }
    const Tensor heads = torch::stack(all, 1);
    return rotates ? turn(heads) : heads;
  };
  const Tensors parts = {pick(0, c.heads, true),
                         pick(c.heads, c.kv_heads, true),
                         pick(c.heads + c.kv_heads, c.kv_heads, false)};
  Tensors slopes;
  for (const Tensor& slope : given.slopes) {
    slopes.push_back(slope.to(torch::kDouble));
  }
  torch::autograd::backward(parts, slopes);
  Tensors results;
  for (const Tensor& part : parts) results.push_back(part.detach());
  results.push_back(x.grad());
  return results;
}

TEST(SplitHeads, MatchesDefinition) {
  for (const HeadsCase& c : kHeadsCases) {
    for (const auto type : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      const auto given = make_heads_inputs(c, type);
      const Tensors wanted = exact_heads(c, given);
      const Tensors fused = heads_results(c, given, ops::split_heads);
      const Tensors plain = heads_results(c, given, ops::fallback::split_heads);
      const double rounding = type == torch::kFloat  ? 1e-6
                              : type == torch::kHalf ? 1e-3
                                                     : 1e-2;
      for (size_t i = 0; i < wanted.size(); ++i) {
        for (const Tensors& got : {fused, plain}) {
          EXPECT_EQ(got[i].scalar_type(), type);
          EXPECT_EQ(got[i].sizes(), wanted[i].sizes());
          EXPECT_LE(relative_error(wanted[i], got[i].to(torch::kDouble)),
                    rounding)
              << type << " D " << c.dim << " " << i;
        }
      }
    }
  }
}

TEST(SplitHeads, SavesNothingButAnglesPerSample) {
  const HeadsCase shared = {2, 16, 4, 2, 32, true, false};
  HeadsCase own = shared;
  own.per_sample = true;
  for (const HeadsCase& c : {shared, own}) {
    const auto given = make_heads_inputs(c, torch::kFloat);
    KeptMeter kept;
    const Tensor qkv = given.qkv * 1;
    const KeptMeter::Scope scope(kept, 0);
    const auto made =
        ops::split_heads(qkv, c.heads, c.kv_heads, given.cos, given.sin);
    ASSERT_TRUE(made.q.requires_grad());
    const int64_t table =
        allocated_bytes(given.cos.numel() * int64_t{4}, device());
    EXPECT_EQ(kept.live_bytes(), c.per_sample ? 2 * table : 0);
  }
}

TEST(SplitHeads, GradientsOfSomeParts) {
  const HeadsCase c = {2, 3, 2, 1, 32, true, false};
  const auto given = make_heads_inputs(c, torch::kFloat);
  const auto made = ops::split_heads(given.qkv * 1, c.heads, c.kv_heads,
                                     given.cos, given.sin);
  made.v.sum().backward();
  const Tensor gradient = testing::take_gradients({given.qkv})[0];
  const int64_t before = (c.heads + c.kv_heads) * c.dim;
  EXPECT_TRUE(gradient.narrow(-1, 0, before).eq(0).all().item<bool>());
  EXPECT_TRUE(gradient.narrow(-1, before, c.dim).eq(1).all().item<bool>());
}

TEST(SplitHeads, LeavesAndCheckpoints) {
  const HeadsCase c = {2, 5, 4, 2, 32, true, false};
  const auto given = make_heads_inputs(c, torch::kFloat);
  const Tensors wanted = heads_results(c, given, ops::split_heads);
  const Tensor before = given.qkv.detach().clone();
  // A leaf is not modified.
  const auto made =
      ops::split_heads(given.qkv, c.heads, c.kv_heads, given.cos, given.sin);
  EXPECT_TRUE(same(made.q, wanted[0]));
  EXPECT_TRUE(same(given.qkv.detach(), before));
  const Tensors again = checkpoint_list(
      [c, given](const Tensors& in) {
        const auto [q, k, v] = ops::split_heads(in[0] * 1, c.heads, c.kv_heads,
                                                given.cos, given.sin);
        return Tensors{q, k, v};
      },
      {given.qkv});
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(same(again[i], wanted[i])) << i;
  torch::autograd::backward(again, given.slopes);
  EXPECT_TRUE(same(testing::take_gradients({given.qkv})[0], wanted[3]));
}

TEST(SplitHeads, Errors) {
  const auto error = [](std::vector<int64_t> sizes, int64_t heads,
                        const Tensor& cos) {
    return error_of([&] {
      ops::split_heads(torch::zeros(sizes, on_device()), heads, 1, cos);
    });
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(
      has(error({2, 3, 10}, 2, {}), "got [2, 3, 10] for 2 heads and 1"));
  EXPECT_TRUE(has(error({2, 12}, 2, {}), "[split_heads] expected qkv"));
  EXPECT_TRUE(has(error({2, 3, 12}, 0, {}), "for 0 heads"));
  EXPECT_TRUE(has(error({2, 3, 16}, 2, torch::ones({3, 2}, on_device())),
                  "expected cos and sin or neither"));
}

}  // namespace
}  // namespace reprise
