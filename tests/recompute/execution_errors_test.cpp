#include "recompute/recompute_context.h"
#include "support.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/checkpoint.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>

#include <stdexcept>

namespace reprise {
namespace {

using testing::device;
using testing::equal_stages;
using testing::error_of;
using testing::on_device;
using testing::same;
using testing::take_gradients;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Returns a chain of three stages with `middle` in the middle.
Chain with_middle(Stage middle) {
  const Chain plain = equal_stages(2, 16);
  return Chain({plain[0], std::move(middle), plain[1]});
}

/// Checks that another chain still runs.
void expect_usable() {
  const Chain chain = equal_stages(4, 8);
  const auto x = torch::randn({2, 8}, on_device());
  chain.forward(x, make_schedule("none", 4)).sum().backward();
  const auto expected = take_gradients(chain.parameters());
  chain.forward(x, make_schedule("sqrt", 4)).sum().backward();
  const auto got = take_gradients(chain.parameters());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(same(got[i], expected[i]));
  }
  EXPECT_FALSE(is_recomputing());
}

/// Runs `chain` by `strategy`, which must fail, as an Execution and inside of
/// an autograd graph. Checks that no memory is left behind. Returns the text of
/// the error.
template <class Error = c10::Error>
std::string failure(const Chain& chain, const std::string& strategy,
                    const torch::Tensor& x) {
  const auto schedule = make_schedule(strategy, chain.size());
  const int64_t before = live_bytes(device());
  std::string text;
  {
    Execution execution(chain, schedule);
    try {
      const auto y = execution.forward({x});
      execution.backward({torch::ones_like(y[0])});
      ADD_FAILURE() << "expected an error";
    } catch (const Error& error) {
      text = error.what();
    }
    take_gradients(chain.parameters());
    EXPECT_FALSE(execution.pending());
    EXPECT_EQ(live_bytes(device()), before) << "the execution held something";
  }
  torch::Tensor y;
  EXPECT_THROW(
      {
        y = chain.forward(x, schedule);
        y.sum().backward();
      },
      Error);
  take_gradients(chain.parameters());
  const int64_t output = y.defined() ? int64_t(y.nbytes()) : 0;
  EXPECT_EQ(live_bytes(device()), before + output) << "the node held something";
  expect_usable();
  return text;
}

TEST(ExecutionErrors, StageModifiesItsInput) {
  const auto x = torch::randn({32, 16}, on_device());
  const Chain middle =
      with_middle(make_stage("bad", [](torch::Tensor t) { return t.relu_(); }));
  for (const char* strategy : {"none", "all", "checkpoints:0"}) {
    const auto text = failure(middle, strategy, x);
    EXPECT_TRUE(contains(text,
                         "input 0 of stage 'bad' was modified in place by "
                         "the stage itself"))
        << text;
    EXPECT_TRUE(contains(text, "in stage 1 'bad'")) << text;
  }
  const Chain first(
      {make_stage("bad", [](torch::Tensor t) { return t.mul_(2); }),
       equal_stages(1, 16)[0]});
  failure(first, "all", x);
}

TEST(ExecutionErrors, InputIsModifiedBetweenForwardAndBackward) {
  const Chain chain = equal_stages(3, 16);
  auto x = torch::randn({2, 16}, on_device());
  Execution execution(chain, make_schedule("checkpoints:0", 3));
  const auto y = execution.forward({x});
  x.add_(1);
  const auto text =
      error_of([&] { execution.backward({torch::ones_like(y[0])}); });
  EXPECT_TRUE(contains(text, "modified in place by other code")) << text;
  expect_usable();
}

TEST(ExecutionErrors, ParameterIsModifiedBetweenForwardAndBackward) {
  for (const char* strategy :
       {"none", "all", "sqrt", "checkpoints:0", "revolve:1"}) {
    const Chain chain = equal_stages(4, 16);
    const auto x = torch::randn({2, 16}, on_device());
    Execution execution(chain, make_schedule(strategy, 4));
    const auto y = execution.forward({x});
    {
      const torch::NoGradGuard no_grad;
      // Of the second stage: the gradient of the first depends on it.
      chain[1].modules()[0]->parameters()[0].add_(1);
    }
    const auto text =
        error_of([&] { execution.backward({torch::ones_like(y[0])}); });
    EXPECT_TRUE(contains(text, "modified")) << strategy << ": " << text;
  }
  expect_usable();
}

TEST(ExecutionErrors, ParameterMayChangeAfterTheBackward) {
  const Chain chain = equal_stages(4, 16);
  const auto x = torch::randn({2, 16}, on_device());
  Execution execution(chain, make_schedule("checkpoints:0", 4));
  for (int i = 0; i < 2; ++i) {
    const auto y = execution.forward({x});
    execution.backward({torch::ones_like(y[0])});
    const torch::NoGradGuard no_grad;
    for (auto& p : chain.parameters()) p.sub_(p.grad(), 0.1);
  }
}

TEST(ExecutionErrors, RecomputationDiffersInShape) {
  int calls = 0;
  const Chain chain =
      with_middle(make_stage("fickle", [&](const torch::Tensor& t) {
        return ++calls % 2 == 0 ? torch::cat({t, t}) : t * 1;
      }));
  const auto x = torch::randn({32, 16}, on_device());
  const auto text = failure(chain, "all", x);
  EXPECT_TRUE(contains(
      text, "'fickle' to return tensors of the same types and shapes when"))
      << text;
  EXPECT_TRUE(contains(text, "[32, 16]") && contains(text, "[64, 16]")) << text;
}

TEST(ExecutionErrors, ForwardThrows) {
  const Chain chain = with_middle(
      make_stage("thrower", [](const torch::Tensor&) -> torch::Tensor {
        throw std::out_of_range("mine");
      }));
  const auto x = torch::randn({32, 16}, on_device());
  // Exceptions of the user propagate unchanged.
  EXPECT_EQ(failure<std::out_of_range>(chain, "none", x), "mine");
  EXPECT_EQ(failure<std::out_of_range>(chain, "sqrt", x), "mine");
}

TEST(ExecutionErrors, RecomputationThrows) {
  const Chain chain =
      with_middle(make_stage("thrower", [](const torch::Tensor& t) {
        if (is_recomputing()) throw std::out_of_range("mine");
        return t * 2;
      }));
  const auto x = torch::randn({32, 16}, on_device());
  for (const char* strategy : {"all", "checkpoints:0", "revolve:1"}) {
    EXPECT_EQ(failure<std::out_of_range>(chain, strategy, x), "mine");
  }
}

TEST(ExecutionErrors, LibTorchErrorsNameTheStage) {
  const Chain chain =
      with_middle(make_stage("narrow", torch::nn::Linear(3, 3)));
  chain[1].modules()[0]->to(device());
  const auto x = torch::randn({32, 16}, on_device());
  EXPECT_TRUE(
      contains(failure(chain, "sqrt", x), "in stage 1 'narrow' (forward-"));
}

TEST(ExecutionErrors, StageReturnsNothing) {
  const Chain chain = with_middle(
      make_stage("empty", [](const Tensors&) { return Tensors{}; }));
  const auto x = torch::randn({32, 16}, on_device());
  EXPECT_TRUE(contains(failure(chain, "none", x),
                       "'empty' to return at least one tensor"));
}

TEST(ExecutionErrors, StageReturnsUndefinedTensors) {
  const Chain chain = with_middle(make_stage("undefined", [](const Tensors&) {
    return Tensors{torch::Tensor(), torch::Tensor()};
  }));
  const auto x = torch::randn({32, 16}, on_device());
  for (const char* strategy : {"none", "checkpoints:0"}) {
    const auto text = failure(chain, strategy, x);
    EXPECT_TRUE(contains(text,
                         "expected stage 1 'undefined' to return a "
                         "tensor, got 2 undefined"))
        << text;
  }
}

TEST(ExecutionErrors, UndefinedOutputHasNoGradient) {
  const Chain chain({make_stage("optional", [](const torch::Tensor& t) {
    return std::make_tuple(t * 2, torch::Tensor());
  })});
  const auto x = torch::randn({4}, on_device()).requires_grad_();
  Execution execution(chain, make_schedule("none", 1));
  execution.forward({x});
  const auto one = torch::ones({4}, on_device());
  const auto text = error_of([&] { execution.backward({one, one}); });
  EXPECT_TRUE(contains(text,
                       "expected no gradient for output 1 of the chain, since "
                       "stage 0 'optional' returned it undefined"))
      << text;
  // The forward pass is still pending.
  EXPECT_TRUE(same(execution.backward({one, {}})[0], 2 * one));
}

TEST(ExecutionErrors, StagesDoNotCompose) {
  const auto x = torch::randn({32, 16}, on_device());
  const Chain more =
      with_middle(make_stage("split", [](const torch::Tensor& t) {
        return std::make_tuple(t * 1, t * 2, t * 3);
      }));
  const std::string expected =
      "[Execution] expected 1 tensor for stage 2 'stage1', got 3 from stage 1 "
      "'split'; Stage::on_first() passes additional tensors through";
  for (const char* strategy : {"none", "all", "checkpoints:0"}) {
    const auto text = failure(more, strategy, x);
    EXPECT_TRUE(contains(text, expected)) << text;
  }
  {
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(
        contains(error_of([&] { more.forward(x, make_schedule("none", 3)); }),
                 expected));
  }
  const Chain fewer = with_middle(make_stage(
      "join",
      [](const torch::Tensor& a, const torch::Tensor& b) { return a + b; }));
  const auto text = failure(fewer, "none", x);
  EXPECT_TRUE(contains(text,
                       "expected 2 tensors for stage 1 'join', got 1 from "
                       "stage 0 'stage0'; a stage must return"))
      << text;
  const auto first = error_of([&] {
    Execution(equal_stages(2, 16), make_schedule("none", 2)).forward({x, x});
  });
  EXPECT_TRUE(
      contains(first,
               "expected 1 tensor for stage 0 'stage0', got 2 as inputs of "
               "the chain"))
      << first;
}

TEST(ExecutionErrors, RejectsCallsInTheWrongOrder) {
  const Chain chain = equal_stages(3, 4);
  EXPECT_TRUE(
      contains(error_of([&] { Execution(chain, make_schedule("none", 4)); }),
               "expected a schedule for 3 stages, got 'none' for 4"));
  Execution execution(chain, make_schedule("none", 3));
  EXPECT_TRUE(contains(error_of([&] { execution.backward({}); }),
                       "backward needs a forward before it"));
  execution.forward({torch::ones({1, 4}, on_device())});
  EXPECT_TRUE(contains(error_of([&] { execution.backward({}); }),
                       "expected a gradient for each of 1 outputs, got 0"));
  {
    const torch::NoGradGuard no_grad;
    execution.forward({torch::ones({1, 4}, on_device())});
  }
  EXPECT_TRUE(contains(error_of([&] {
                         execution.backward({torch::ones({1, 4})});
                       }),
                       "with grad mode on"));
  expect_usable();
}

}  // namespace
}  // namespace reprise
