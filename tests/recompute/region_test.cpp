#include "region_net.h"

#include <reprise/recompute/region.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>

#include <torch/nn/modules/linear.h>

namespace reprise {
namespace {

using testing::error_of;
using testing::make_region_net;
using testing::region_chain;
using testing::RegionNet;
using testing::same;

/// Loss, gradients and buffers of two steps.
std::vector<torch::Tensor> train_twice(
    const std::shared_ptr<RegionNet>& net,
    const std::function<torch::Tensor(const Tensors&)>& step) {
  torch::manual_seed(5);
  std::vector<torch::Tensor> results;
  for (int i = 0; i < 2; ++i) {
    results.push_back(step(RegionNet::inputs(3)));
  }
  for (auto& gradient : testing::take_gradients(net->parameters())) {
    results.push_back(gradient);
  }
  for (const auto& buffer : net->buffers()) results.push_back(buffer.clone());
  results.push_back(torch::rand({1}));  // the generator
  return results;
}

TEST(Region, EveryVariantGivesTheResultsOfPlainCode) {
  const auto plain = make_region_net();
  const auto expected = train_twice(plain, [&](const Tensors& inputs) {
    const auto loss = plain->forward(inputs)[0];
    loss.backward();
    return loss.detach();
  });
  const auto count =
      with_region_variants(region_chain(plain), RegionNet::inputs(3))[0]
          .variants()
          .size();
  ASSERT_EQ(count, 4u);  // two down, two up
  for (size_t v = 0; v <= count; ++v) {
    const auto net = make_region_net();
    const Chain chain =
        with_region_variants(region_chain(net), RegionNet::inputs(3));
    Execution execution(
        chain, Schedule("variant", 1,
                        {{OpKind::kForwardKeep, 0, static_cast<int>(v)},
                         {OpKind::kBackward, 0}}));
    const auto got = train_twice(net, [&](const Tensors& inputs) {
      Tensors outputs = execution.forward(inputs);
      execution.backward({torch::ones_like(outputs[0])});
      return outputs[0];
    });
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(same(expected[i], got[i])) << "variant " << v << ", " << i;
    }
  }
}

TEST(Region, VariantsSaveLessAndLess) {
  const auto net = make_region_net();
  const Tensors inputs = RegionNet::inputs(4, 32);
  const Chain chain = with_region_variants(region_chain(net), inputs);
  const StageCosts costs = measure_stage_costs(chain, inputs).stages.at(0);
  int64_t before = costs.saved_bytes;
  for (const auto& variant : costs.variants) {
    EXPECT_LT(variant.saved_bytes, before);
    before = variant.saved_bytes;
  }
  // The skips and the inputs of the regions stay.
  EXPECT_LT(before, costs.saved_bytes / 2);
  EXPECT_GT(before, 0);
}

TEST(Region, MeasuresWhatRegionsSave) {
  torch::nn::Linear linear(64, 64);
  linear->to(testing::device());
  int calls = 0;
  const Stage stage(
      "stage",
      [&calls, linear](const Tensors& in) {
        ++calls;
        auto x = region(
            "two",
            [](const torch::Tensor& t) {
              return torch::tanh(torch::exp(t)) * 2;
            },
            in[0]);
        auto y = region("none", linear, x);
        y = region(
            "two",
            [](const torch::Tensor& t) { return torch::sin(torch::exp(t)); },
            y);
        return Tensors{y.sum()};
      },
      {linear.ptr()});
  const auto costs = measure_regions(
      stage, {torch::randn({16, 64}, testing::on_device()).requires_grad_()});
  EXPECT_EQ(calls, 2);
  ASSERT_EQ(costs.size(), 2u);
  EXPECT_EQ(costs[0].name, "two");
  // Results of exp and tanh, and of exp; a multiplication by a number saves
  // nothing, and a linear layer only its input.
  const int64_t one = 16 * 64 * 4;
  EXPECT_EQ(costs[0].saved_bytes, 3 * one);
  EXPECT_GT(costs[0].forward_ms, 0);
  EXPECT_EQ(costs[1].saved_bytes, 0);
}

// A checkpoint holds a copy of the buffers of its modules.
TEST(Region, CopiesOfBuffersCount) {
  constexpr int64_t kChannels = 4096;
  torch::nn::BatchNorm1d norm(kChannels);
  norm->to(testing::device());
  const auto normed = [norm](const torch::Tensor& t) mutable {
    return torch::exp(norm(t));
  };
  const Chain chain({with_region_variants(
      Stage("s",
            [normed](const Tensors& in) {
              const auto x = region("a", normed, in[0]);
              return Tensors{region("b", normed, x).sum()};
            },
            {norm.ptr()}),
      {"a", "b"})});
  const auto costs =
      measure_stage_costs(
          chain,
          {torch::rand({2, kChannels}, testing::on_device()).requires_grad_()})
          .stages[0];
  // The input of the second region, and the running statistics for each.
  const int64_t one = kChannels * 4;
  EXPECT_GE(costs.variants.at(1).saved_bytes, 2 * one + 2 * 2 * one);
  EXPECT_LT(costs.variants.at(1).saved_bytes, 2 * one + 2 * 2 * one + 4096);
}

TEST(Region, IsAPlainCallElsewhere) {
  int calls = 0;
  const auto count = [&calls](const torch::Tensor& t) {
    ++calls;
    return torch::exp(t);
  };
  auto x = torch::ones({2}).requires_grad_();
  region("outside", count, x).sum().backward();
  EXPECT_EQ(calls, 1);
  // Inside of a recomputed region, and if the variant recomputes others.
  const Stage stage = with_region_variants(
      Stage("s",
            [count](const Tensors& in) {
              auto y = region(
                  "outer",
                  [count](const torch::Tensor& t) {
                    return torch::sin(region("inner", count, t));
                  },
                  in[0]);
              return Tensors{region("other", count, y).sum()};
            }),
      {"outer", "inner"}, 1);
  ASSERT_EQ(stage.variants().size(), 1u);
  calls = 0;
  const Tensors out = stage.function(1)({x});
  EXPECT_EQ(calls, 2);
  out[0].backward();
  EXPECT_EQ(calls, 3);  // the inner one again, with the outer one
}

TEST(Region, ChoosesFewVariantsOfMany) {
  std::vector<std::string> order;
  for (int i = 0; i < 20; ++i) order.push_back(std::to_string(i));
  const Stage stage("s", [](const Tensors& in) { return in; });
  const Stage chosen = with_region_variants(stage, order, 3);
  ASSERT_EQ(chosen.variants().size(), 3u);
  EXPECT_EQ(chosen.variants()[0].name, "7 of 20 regions recomputed");
  EXPECT_EQ(chosen.variants()[2].name, "20 of 20 regions recomputed");
  EXPECT_TRUE(with_region_variants(stage, {}).variants().empty());
  EXPECT_NE(error_of([&] {
              with_region_variants(stage, order, 0);
            }).find("expected at least one variant"),
            std::string::npos);
}

TEST(Region, StagesOfOneKindHaveOneOrder) {
  const auto make = [](const std::string& name) {
    return Stage(name,
                 [](const Tensors& in) {
                   auto x = region(
                       "a",
                       [](const torch::Tensor& t) {
                         return torch::exp(torch::exp(t));
                       },
                       in[0]);
                   return Tensors{region(
                       "b",
                       [](const torch::Tensor& t) {
                         return torch::sin(torch::cos(t));
                       },
                       x)};
                 })
        .of_kind("pair");
  };
  const Chain chain = with_region_variants(
      Chain(
          {make("0"), make("1"),
           make_stage("sum", [](const torch::Tensor& t) { return t.sum(); })}),
      {torch::rand({8, 8}).requires_grad_()});
  EXPECT_EQ(chain[0].variants().size(), 2u);
  EXPECT_EQ(chain[1].variants().size(), 2u);
  EXPECT_EQ(chain[1].kind(), "pair");
  EXPECT_TRUE(chain[2].variants().empty());
}

TEST(Region, ErrorsSayWhatToChange) {
  const auto x = torch::ones({2});
  EXPECT_NE(error_of([&] {
              region_list("a", nullptr, {x});
            }).find("expected a function for 'a'"),
            std::string::npos);
  const torch::NoGradGuard no_grad;
  EXPECT_NE(error_of([&] {
              measure_regions(Stage("s", [](const Tensors& t) { return t; }),
                              {x});
            }).find("expected grad mode to be on"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
