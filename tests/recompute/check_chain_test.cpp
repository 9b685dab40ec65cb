#include "recompute/recompute_context.h"
#include "support.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/check_chain.h>
#include <reprise/recompute/checkpoint.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <string>
#include <vector>

namespace reprise {
namespace {

using testing::device;
using testing::equal_stages;
using testing::error_of;
using testing::on_device;
using testing::same;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kCheckedWidth = 16;

Tensor checked_input() {
  return torch::randn({32, kCheckedWidth}, on_device());
}

/// Returns a chain of three stages with `middle` in the middle.
Chain around(Stage middle) {
  const Chain plain = equal_stages(2, kCheckedWidth);
  return Chain({plain[0], std::move(middle), plain[1]});
}

void expect_error(const Chain& chain, const std::string& part) {
  const auto text = error_of([&] { check_chain(chain, {checked_input()}); });
  EXPECT_NE(text.find(part), std::string::npos) << text;
  EXPECT_FALSE(is_recomputing());
}

TEST(CheckChain, AcceptsChainsAndChangesNothing) {
  nn::Sequential net(nn::Linear(kCheckedWidth, kCheckedWidth),
                     nn::BatchNorm1d(kCheckedWidth), nn::Dropout(0.5));
  net->to(device());
  std::vector<Tensor> buffers;
  for (const auto& buffer : net->buffers()) buffers.push_back(buffer.clone());
  const auto x = checked_input();
  torch::manual_seed(4);
  const auto expected = torch::rand({4}, on_device());
  torch::manual_seed(4);
  check_chain(Chain(net), {x});
  EXPECT_TRUE(torch::equal(torch::rand({4}, on_device()), expected));
  for (size_t i = 0; i < buffers.size(); ++i) {
    EXPECT_TRUE(torch::equal(net->buffers()[i], buffers[i])) << i;
  }
  for (const auto& parameter : net->parameters()) {
    EXPECT_FALSE(parameter.grad().defined());
  }
}

TEST(CheckChain, HoldsTwoBoundariesOnly) {
  const auto x = torch::randn({4096, kCheckedWidth}, on_device());
  const Chain chain = equal_stages(20, kCheckedWidth);
  const MemoryMeter meter(device());
  check_chain(chain, {x});
  EXPECT_LT(meter.peak_increase_bytes(), 5 * static_cast<int64_t>(x.nbytes()));
}

TEST(CheckChain, FindsUnregisteredParameters) {
  nn::Linear linear(kCheckedWidth, kCheckedWidth);
  linear->to(device());
  const auto apply = [linear](const Tensor& x) mutable { return linear(x); };
  expect_error(around(make_stage("bare", apply)),
               "[check_chain] expected stage 1 'bare' to use parameters of its "
               "modules only, got a parameter of type float [16");
  // Inside of a checkpoint, and also if another stage has it.
  const Chain chain(
      {make_stage("first", linear), make_stage("again", [&](const Tensor& x) {
         return checkpoint(apply, x.tanh());
       })});
  expect_error(chain, "' of stage 0 'first', that is not among them");
  check_chain(around(make_stage("listed", apply, {linear.ptr()})),
              {checked_input()});
  // The stage returns the parameter itself.
  const Tensor bare =
      torch::ones({kCheckedWidth}, on_device()).requires_grad_();
  expect_error(
      around(make_stage("leaf", [bare](const Tensor&) { return bare; })),
      "got a parameter of type float [16] that is not among them");
}

TEST(CheckChain, AcceptsInputsThatRequireGradients) {
  const auto x = checked_input().requires_grad_();
  check_chain(equal_stages(2, kCheckedWidth), {x});
  EXPECT_FALSE(x.grad().defined());
}

TEST(CheckChain, FindsStagesThatDoNotCompose) {
  expect_error(
      around(make_stage(
          "split",
          [](const Tensor& x) { return std::make_tuple(x * 1, x * 2); })),
      "expected 1 tensor for stage 2 'stage1', got 2 from stage 1 'split'; "
      "Stage::on_first() passes");
  expect_error(
      around(make_stage(
          "join", [](const Tensor& x, const Tensor& y) { return x + y; })),
      "expected 2 tensors for stage 1 'join', got 1 from stage 0 'stage0'; a "
      "stage "
      "must return or pass through all tensors");
}

TEST(CheckChain, FindsStagesWithoutResults) {
  expect_error(
      around(make_stage("empty", [](const Tensors&) { return Tensors{}; })),
      "expected stage 1 'empty' to return at least one tensor, got none");
  expect_error(
      around(make_stage("none", [](const Tensor&) { return Tensor(); })),
      "expected stage 1 'none' to return a tensor, got 1 undefined");
  expect_error(
      around(make_stage("cut", [](const Tensor& x) { return x.detach() * 2; })),
      "expected stage 1 'cut' to return a tensor that requires a "
      "gradient");
}

TEST(CheckChain, FindsStagesThatModifyTheirInput) {
  expect_error(
      around(make_stage("bad", [](Tensor t) { return t.relu_(); })),
      "expected stage 1 'bad' to leave its inputs unchanged, got input 0");
}

TEST(CheckChain, ErrorsOfStagesNameThem) {
  const Chain chain = around(make_stage("narrow", nn::Linear(3, 3)));
  chain[1].modules()[0]->to(device());
  expect_error(chain, "in stage 1 'narrow'");
}

TEST(CheckChain, RejectsWrongUse) {
  const Chain chain = equal_stages(2, kCheckedWidth);
  EXPECT_NE(error_of([&] {
              check_chain(chain, {});
            }).find("expected at least one input, got none"),
            std::string::npos);
  const torch::NoGradGuard no_grad;
  expect_error(chain, "expected grad mode to be on, got off");
}

Chain losing(const std::function<Tensor(Tensor)>& loss, double dropout = 0) {
  torch::manual_seed(3);
  nn::Linear linear(kCheckedWidth, kCheckedWidth);
  nn::BatchNorm1d norm(kCheckedWidth);
  linear->to(device());
  norm->to(device());
  return Chain({make_stage("linear", linear), make_stage("norm", norm),
                make_stage("dropout", nn::Dropout(dropout)),
                make_stage("loss", loss)});
}

void expect_loss_error(const Chain& chain, const std::string& part) {
  const auto text = error_of([&] {
    check_loss(chain, {torch::randn({6, kCheckedWidth}, on_device())});
  });
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(CheckChain, TellsAMeanLossFromASum) {
  const auto x = torch::randn({6, kCheckedWidth}, on_device());
  for (const double dropout : {0.0, 0.3}) {
    const Chain sum =
        losing([](const Tensor& t) { return t.square().sum(); }, dropout);
    const auto before = sum.buffers()[0].clone();
    check_loss(sum, {x});
    EXPECT_TRUE(same(sum.buffers()[0], before));
    expect_loss_error(
        losing([](const Tensor& t) { return t.square().mean(); }, dropout),
        "expected the sum of the losses, got a mean");
  }
  // Not tested: a loss of 0, and inputs that cannot be repeated.
  check_loss(losing([](const Tensor& t) { return t.sum() * 0; }), {x});
  const Chain two({make_stage("loss", [](const Tensor& a, const Tensor& b) {
    return (a * b.sum()).mean();
  })});
  check_loss(two, {x.clone().requires_grad_(), torch::ones({2}, on_device())});
}

TEST(CheckChain, RefusesWhatIsNoLoss) {
  expect_loss_error(losing([](const Tensor& t) { return t.square(); }),
                    "one floating-point value, got Float of shape [6, ");
  expect_loss_error(
      losing([](const Tensor& t) { return t.detach().square().sum(); }),
      "expected a loss that requires a gradient");
}

}  // namespace
}  // namespace reprise
