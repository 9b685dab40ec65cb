#include "support.h"

#include <reprise/recompute/chain.h>
#include <reprise/recompute/strategy.h>

#include <torch/autograd.h>
#include <torch/nn/modules/dropout.h>

namespace reprise {
namespace {

using testing::device;
using testing::on_device;
using testing::same;
using testing::take_gradients;

torch::nn::Sequential small_net() {
  torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::Tanh(),
                            torch::nn::Linear(16, 16), torch::nn::Dropout(0.5),
                            torch::nn::Linear(16, 4));
  net->to(device());
  return net;
}

TEST(Chain, RunsInsideALargerGraph) {
  auto before = torch::nn::Linear(8, 8);
  auto after = torch::nn::Linear(4, 1);
  before->to(device());
  after->to(device());
  auto net = small_net();
  const Chain chain(net);
  ASSERT_EQ(chain.size(), 5);
  EXPECT_EQ(chain[2].name(), "2");
  EXPECT_EQ(chain.parameters().size(), 6u);

  const auto x = torch::randn({5, 8}, on_device()).requires_grad_();
  std::vector<torch::Tensor> parameters = net->parameters();
  for (const auto& p : before->parameters()) parameters.push_back(p);
  for (const auto& p : after->parameters()) parameters.push_back(p);
  parameters.push_back(x);

  torch::manual_seed(3);
  auto expected_loss =
      after(torch::relu(net->forward(before(x)))).square().mean();
  expected_loss.backward();
  const auto expected = take_gradients(parameters);

  for (const char* strategy : {"none", "all", "sqrt", "checkpoints:0",
                               "checkpoints:1", "every:2", "revolve:2"}) {
    torch::manual_seed(3);
    auto y = chain.forward(before(x), make_schedule(strategy, 5));
    auto loss = after(torch::relu(y)).square().mean();
    loss.backward();
    EXPECT_TRUE(same(loss, expected_loss)) << strategy;
    const auto got = take_gradients(parameters);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same(got[i], expected[i])) << strategy << " " << i;
    }
  }
}

TEST(Chain, SupportsInputsWithoutGradients) {
  const Chain chain(small_net());
  const auto x = torch::randn({5, 8}, on_device());
  chain.eval();
  auto y = chain.forward(x, make_schedule("sqrt", 5));
  EXPECT_TRUE(y.requires_grad());
  y.sum().backward();
  for (const auto& p : chain.parameters()) EXPECT_TRUE(p.grad().defined());
}

TEST(Chain, GradReturnsGradientsOfInputsOnly) {
  const Chain chain(small_net());
  chain.eval();
  const auto x = torch::randn({5, 8}, on_device()).requires_grad_();
  const auto expected = torch::autograd::grad(
      {chain.forward(x, make_schedule("none", 5)).sum()}, {x});
  const auto got = torch::autograd::grad(
      {chain.forward(x, make_schedule("all", 5)).sum()}, {x});
  EXPECT_TRUE(same(got[0], expected[0]));
  for (const auto& p : chain.parameters()) EXPECT_FALSE(p.grad().defined());
}

TEST(Chain, AcceptsModulesAndCallables) {
  torch::nn::Linear linear(3, 3);
  linear->to(device());
  auto shared = linear.ptr();
  const Chain chain = Chain::of(
      linear, [](const torch::Tensor& x) { return std::make_tuple(x, 2 * x); },
      [](const torch::Tensor& a, const torch::Tensor& b) { return a + b; },
      shared, [](const Tensors& list) { return list; });
  ASSERT_EQ(chain.size(), 5);
  EXPECT_EQ(chain.parameters().size(), 2u);  // shared: there once
  const auto x = torch::randn({2, 3}, on_device());
  EXPECT_TRUE(
      same(chain.forward(x, make_schedule("all", 5)), linear(3 * linear(x))));
}

TEST(Chain, AddsGradientsOfTiedWeights) {
  torch::nn::Linear linear(3, 3);
  linear->to(device());
  const Chain chain = Chain::of(linear, torch::nn::Tanh(), linear);
  const auto x = torch::randn({2, 3}, on_device());
  linear(torch::tanh(linear(x))).sum().backward();
  const auto expected = take_gradients(linear->parameters());
  for (const char* strategy : {"none", "all", "checkpoints:0", "revolve:1"}) {
    chain.forward(x, make_schedule(strategy, 3)).sum().backward();
    const auto got = take_gradients(linear->parameters());
    EXPECT_TRUE(same(got[0], expected[0])) << strategy;
    EXPECT_TRUE(same(got[1], expected[1])) << strategy;
  }
}

TEST(Chain, AddsGradientsOfTiedWeightsInTheOrderOfAutograd) {
  torch::nn::Linear linear(32, 32);
  linear->to(device());
  const Chain chain =
      Chain::of(linear, torch::nn::Tanh(), linear, torch::nn::Tanh(), linear);
  const auto x = torch::randn({4, 7, 32}, on_device());
  for (int i = 0; i < 4; ++i) {
    auto y = torch::tanh(linear(torch::tanh(linear(x[i]))));
    linear(y).square().sum().backward();
  }
  const auto expected = take_gradients(linear->parameters());
  for (const char* strategy : {"none", "all", "every:2", "revolve:1"}) {
    for (int i = 0; i < 4; ++i) {
      auto y = chain.forward(x[i], make_schedule(strategy, 5));
      y.square().sum().backward();
    }
    const auto got = take_gradients(linear->parameters());
    EXPECT_TRUE(same(got[0], expected[0])) << strategy;
    EXPECT_TRUE(same(got[1], expected[1])) << strategy;
  }
}

TEST(Chain, SupportsUnusedAndNonDifferentiableOutputs) {
  torch::nn::Linear linear(3, 3);
  linear->to(device());
  const Chain chain({make_stage("a",
                                [linear](const torch::Tensor& x) mutable {
                                  auto y = linear(x);
                                  return Tensors{y, y.argmax(1), y * 2};
                                },
                                {linear.ptr()}),
                     make_stage("b", torch::nn::Tanh()).on_first()});
  const auto x = torch::randn({2, 3}, on_device());
  const auto outputs = chain.forward(Tensors{x}, make_schedule("all", 2));
  ASSERT_EQ(outputs.size(), 3u);
  EXPECT_TRUE(outputs[0].requires_grad());
  EXPECT_FALSE(outputs[1].requires_grad());
  outputs[0].sum().backward();  // outputs[2] is not used
  const auto got = take_gradients(linear->parameters());
  torch::tanh(linear(x)).sum().backward();
  const auto expected = take_gradients(linear->parameters());
  EXPECT_TRUE(same(got[0], expected[0]));
}

TEST(Chain, NoGradModeRunsEachStageOnceAndKeepsNothing) {
  int runs = 0;
  const Chain chain = Chain::of([&runs](const torch::Tensor& x) {
    ++runs;
    return x * 2;
  });
  const torch::NoGradGuard no_grad;
  const auto x = torch::ones({2}, on_device()).requires_grad_();
  const auto y = chain.forward(x, make_schedule("checkpoints:0", 1));
  EXPECT_EQ(runs, 1);
  EXPECT_FALSE(y.requires_grad());
}

TEST(Chain, BackwardRunsOnceAndCannotBeDifferentiated) {
  const Chain chain(small_net());
  const auto x = torch::randn({5, 8}, on_device()).requires_grad_();
  auto y = chain.forward(x, make_schedule("all", 5)).sum();
  y.backward({}, /*retain_graph=*/true);
  EXPECT_NE(testing::error_of([&] {
              y.backward();
            }).find("the backward of a chain can run only once"),
            std::string::npos);
  auto z = chain.forward(x, make_schedule("all", 5)).sum();
  EXPECT_NE(testing::error_of([&] {
              torch::autograd::grad({z}, {x}, {}, true, /*create_graph=*/true);
            }).find("cannot be differentiated"),
            std::string::npos);
}

TEST(Chain, RejectsAnEmptyList) {
  EXPECT_NE(testing::error_of([] {
              Chain(std::vector<Stage>{});
            }).find("got an empty chain"),
            std::string::npos);
  EXPECT_THROW(Chain(torch::nn::Sequential()), c10::Error);
}

TEST(Chain, WrongNumberOfTensorsNamesTheStage) {
  const Chain chain({make_stage("only", torch::nn::Tanh())});
  const auto x = torch::ones({1}, on_device());
  EXPECT_NE(testing::error_of([&] {
              chain.forward(Tensors{x, x}, make_schedule("none", 1));
            }).find("expected 1 tensor for stage 0 'only', got 2"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
