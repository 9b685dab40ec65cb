#include "support.h"

#include <reprise/accumulate/accumulator.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>

#include <torch/nn/functional/loss.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::on_device;
using testing::relative_error;
using testing::take_gradients;

namespace F = torch::nn::functional;

/// A small classifier and a batch of 32 for it.
struct Problem {
  explicit Problem(torch::ScalarType type)
      : net(torch::nn::Linear(12, 24), torch::nn::Tanh(),
            torch::nn::Linear(24, 10)),
        x(torch::randn({32, 12}, on_device(type))),
        y(torch::randint(10, {32}, on_device(torch::kLong))) {
    net->to(device(), type);
  }

  torch::Tensor loss_sum(int64_t first, int64_t count) {
    return F::cross_entropy(
        net->forward(x.narrow(0, first, count)), y.narrow(0, first, count),
        F::CrossEntropyFuncOptions().reduction(torch::kSum));
  }

  std::vector<torch::Tensor> whole_batch() {
    F::cross_entropy(net->forward(x), y).backward();
    return take_gradients(net->parameters());
  }

  torch::nn::Sequential net;
  torch::Tensor x, y;
};

void expect_equal_to_whole_batch(torch::ScalarType type, double tolerance) {
  torch::manual_seed(11);
  Problem problem(type);
  const auto expected = problem.whole_batch();
  const std::vector<std::vector<int64_t>> windows = {
      std::vector<int64_t>(32, 1),
      std::vector<int64_t>(8, 4),
      std::vector<int64_t>(4, 8),
      {5, 9, 18},
      {32}};
  for (const auto& window : windows) {
    Accumulator accumulator(problem.net->parameters());
    accumulator.begin(32);
    int64_t first = 0;
    for (const int64_t count : window) {
      EXPECT_FALSE(accumulator.complete());
      accumulator.backward(problem.loss_sum(first, count), double(count));
      first += count;
    }
    EXPECT_TRUE(accumulator.complete());
    const auto got = take_gradients(problem.net->parameters());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_LT(relative_error(expected[i], got[i]), tolerance)
          << window.size() << " micro-batches, parameter " << i;
    }
  }
}

TEST(Accumulator, EqualsTheWholeBatchInSinglePrecision) {
  expect_equal_to_whole_batch(torch::kFloat, 1e-6);
}

TEST(Accumulator, EqualsTheWholeBatchInDoublePrecision) {
  expect_equal_to_whole_batch(torch::kDouble, 1e-12);
}

TEST(Accumulator, WeightsMicroBatchesByTokens) {
  // Three sequences of 3, 50 and 7 tokens in three micro-batches.
  torch::manual_seed(5);
  torch::nn::Linear net(6, 9);
  net->to(device(), torch::kDouble);
  const int64_t lengths[] = {3, 50, 7};
  Tensors xs, ys;
  for (int i = 0; i < 3; ++i) {
    // With different data in each, so that their weights matter.
    xs.push_back(torch::randn({lengths[i], 6}, on_device(torch::kDouble)) *
                 (i + 1));
    ys.push_back(torch::full({lengths[i]}, 3 * i, on_device(torch::kLong)));
  }
  F::cross_entropy(net(torch::cat(xs)), torch::cat(ys)).backward();
  const auto expected = take_gradients(net->parameters());

  for (int i = 0; i < 3; ++i)
    (F::cross_entropy(net(xs[i]), ys[i]) / 3).backward();
  const auto mean_of_means = take_gradients(net->parameters());
  EXPECT_GT(relative_error(expected[0], mean_of_means[0]), 0.10);

  Accumulator accumulator(net->parameters());
  accumulator.begin(60);
  for (int i = 0; i < 3; ++i) {
    accumulator.backward(
        F::cross_entropy(net(xs[i]), ys[i],
                         F::CrossEntropyFuncOptions().reduction(torch::kSum)),
        double(lengths[i]));
  }
  const auto got = take_gradients(net->parameters());
  EXPECT_LT(relative_error(expected[0], got[0]), 1e-12);
  EXPECT_LT(relative_error(expected[1], got[1]), 1e-12);
}

TEST(Accumulator, EqualsTheWholeBatchWithRecomputation) {
  torch::manual_seed(12);
  Problem problem(torch::kDouble);
  const auto expected = problem.whole_batch();
  const Chain layers(problem.net);
  std::vector<Stage> stages;
  for (int i = 0; i < layers.size(); ++i)
    stages.push_back(layers[i].on_first());
  stages.push_back(make_stage("loss", [](const torch::Tensor& scores,
                                         const torch::Tensor& targets) {
    return F::cross_entropy(
        scores, targets, F::CrossEntropyFuncOptions().reduction(torch::kSum));
  }));
  const Chain chain(std::move(stages));
  Execution execution(chain, make_schedule("all", chain.size()));
  Accumulator accumulator(chain.parameters());
  accumulator.begin(32);
  int64_t first = 0;
  for (const int64_t count : {5, 9, 18}) {
    const auto loss = execution.forward(
        {problem.x.narrow(0, first, count), problem.y.narrow(0, first, count)});
    const double weight = accumulator.weigh(double(count));
    execution.backward({torch::full_like(loss[0], weight)});
    first += count;
  }
  const auto got = take_gradients(chain.parameters());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LT(relative_error(expected[i], got[i]), 1e-12);
  }
}

TEST(Accumulator, NormAndClipEqualLibTorch) {
  torch::manual_seed(13);
  Problem problem(torch::kFloat);
  Accumulator accumulator(problem.net->parameters());
  accumulator.begin(32);
  accumulator.backward(problem.loss_sum(0, 32), 32);
  std::vector<torch::Tensor> copies;
  for (const auto& p : problem.net->parameters()) {
    auto copy = p.detach().clone();
    copy.mutable_grad() = p.grad().clone();
    copies.push_back(copy);
  }
  const double max_norm = accumulator.norm().item<double>() / 3;
  const double expected = torch::nn::utils::clip_grad_norm_(copies, max_norm);
  EXPECT_NEAR(accumulator.clip(max_norm).item<double>(), expected, 1e-6);
  for (size_t i = 0; i < copies.size(); ++i) {
    EXPECT_LT(
        relative_error(copies[i].grad(), problem.net->parameters()[i].grad()),
        1e-6);
  }
  EXPECT_NEAR(accumulator.norm().item<double>(), max_norm, 1e-6);
  // A gradient within the limit does not change.
  const auto before = problem.net->parameters()[0].grad().clone();
  accumulator.clip(1000);
  EXPECT_TRUE(torch::equal(before, problem.net->parameters()[0].grad()));
}

TEST(Accumulator, NormOfHalfPrecisionDoesNotOverflow) {
  auto p = torch::zeros({4}, on_device(torch::kHalf)).requires_grad_();
  p.mutable_grad() = torch::full({4}, 30000, on_device(torch::kHalf));
  EXPECT_NEAR(gradient_norm({p}).item<double>(), 60000, 1);
  EXPECT_EQ(gradient_norm({torch::zeros({1})}).item<double>(), 0);
}

TEST(Accumulator, UpdateStepsAndClears) {
  Problem problem(torch::kFloat);
  torch::optim::SGD optimizer(problem.net->parameters(), 0.1);
  Accumulator accumulator(problem.net->parameters());
  const auto before = problem.net->parameters()[0].detach().clone();
  accumulator.begin(32);
  accumulator.backward(problem.loss_sum(0, 32), 32);
  accumulator.update(optimizer);
  EXPECT_FALSE(torch::equal(before, problem.net->parameters()[0]));
  EXPECT_FALSE(problem.net->parameters()[0].grad().defined());
  accumulator.begin(4);  // the next window
  accumulator.abandon();
  accumulator.begin(4);
}

TEST(Accumulator, KeptGradientsGiveTheSameUpdates) {
  const auto train = [](bool keep) {
    torch::manual_seed(15);
    Problem problem(torch::kFloat);
    const auto parameters = problem.net->parameters();
    torch::optim::AdamW optimizer(parameters, 0.1);
    Accumulator accumulator(parameters);
    accumulator.keep_gradients(keep);
    std::vector<const void*> places;
    for (int window = 0; window < 4; ++window) {
      accumulator.begin(32);
      for (const int64_t first : {0, 20}) {
        const int64_t count = first == 0 ? 20 : 12;
        accumulator.backward(problem.loss_sum(first, count), double(count));
      }
      accumulator.clip(0.1);
      accumulator.update(optimizer);
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto& gradient = parameters[i].grad();
        EXPECT_EQ(gradient.defined(), keep);
        if (!keep) continue;
        if (window == 0) places.push_back(gradient.data_ptr());
        EXPECT_EQ(gradient.data_ptr(), places[i]);
        EXPECT_EQ(gradient.abs().max().item<float>(), 0);
      }
    }
    accumulator.abandon();
    EXPECT_FALSE(parameters[0].grad().defined());
    return parameters;
  };
  const auto kept = train(true);
  const auto dropped = train(false);
  for (size_t i = 0; i < kept.size(); ++i) {
    EXPECT_TRUE(testing::same(kept[i], dropped[i])) << i;
  }
}

TEST(Accumulator, ResumesAPartialWindow) {
  torch::manual_seed(14);
  Problem problem(torch::kDouble);
  const auto expected = problem.whole_batch();
  Accumulator first(problem.net->parameters());
  first.begin(32);
  first.backward(problem.loss_sum(0, 20), 20);
  // Gradients stay in place, and a new accumulator resumes the window.
  Accumulator second(problem.net->parameters());
  second.resume(first.total_count(), first.done_count());
  second.backward(problem.loss_sum(20, 12), 12);
  EXPECT_TRUE(second.complete());
  const auto got = take_gradients(problem.net->parameters());
  EXPECT_LT(relative_error(expected[0], got[0]), 1e-12);
}

TEST(Accumulator, RejectsWrongUse) {
  Problem problem(torch::kFloat);
  torch::optim::SGD optimizer(problem.net->parameters(), 0.1);
  Accumulator accumulator(problem.net->parameters());
  const auto expect = [&](const std::string& part, auto call) {
    const auto text = error_of(call);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect("no window is open", [&] { accumulator.update(optimizer); });
  expect("no window is open",
         [&] { accumulator.backward(problem.loss_sum(0, 1), 1); });
  expect("expected a positive total count, got 0",
         [&] { accumulator.begin(0); });
  expect("expected a positive total count, got -3",
         [&] { accumulator.begin(-3); });
  accumulator.begin(32);
  expect("a window is already open", [&] { accumulator.begin(32); });
  expect("expected a positive count for a micro-batch, got 0",
         [&] { accumulator.backward(problem.loss_sum(0, 1), 0); });
  accumulator.backward(problem.loss_sum(0, 8), 8);
  const auto before = problem.net->parameters()[0].detach().clone();
  expect("the window is not complete: 8 of 32 done",
         [&] { accumulator.update(optimizer); });
  expect("the window is not complete", [&] { accumulator.clip(1); });
  expect("the window is not complete", [&] { accumulator.norm(); });
  EXPECT_TRUE(torch::equal(before, problem.net->parameters()[0]));
  expect("add up to 32, got 38",
         [&] { accumulator.backward(problem.loss_sum(0, 30), 30); });
  expect("sum of the losses as one element",
         [&] { accumulator.backward(problem.net->forward(problem.x), 24); });
  EXPECT_EQ(accumulator.done_count(), 8);
  expect("expected parameters, got none", [] { Accumulator none({}); });
}

TEST(Accumulator, SharesAddUpToTheWindow) {
  torch::Tensor p =
      torch::tensor({2.0, -1.0}, on_device()).requires_grad_(true);
  const auto samples = torch::randn({9, 2}, on_device());
  (samples * p).tanh().sum().div(9).backward();
  const auto expected = p.grad().clone();
  torch::Tensor sum = torch::zeros_like(expected);
  // Three ranks with 5, 4 and 0 samples.
  for (const auto& [begin, end] : {std::pair{0, 5}, {5, 9}, {9, 9}}) {
    p.mutable_grad().reset();
    Accumulator accumulator({p});
    accumulator.begin_share(9, end - begin);
    EXPECT_EQ(accumulator.complete(), begin == end);
    for (int i = begin; i < end; ++i) {
      accumulator.backward((samples[i] * p).tanh().sum(), 1);
    }
    EXPECT_TRUE(accumulator.complete());
    if (p.grad().defined()) sum += p.grad();
    if (begin == 0) {
      EXPECT_NE(
          error_of([&] { accumulator.weigh(1); }).find("add up to 5, got 6"),
          std::string::npos);
    }
  }
  EXPECT_LT(relative_error(expected, sum), 1e-6);
  Accumulator accumulator({p});
  EXPECT_NE(error_of([&] {
              accumulator.begin_share(4, 5);
            }).find("between 0 and 4, got 5"),
            std::string::npos);
}

TEST(Accumulator, RefusesALossWithoutAGradient) {
  Problem problem(torch::kFloat);
  Accumulator accumulator(problem.net->parameters());
  accumulator.begin(32);
  const auto text = error_of(
      [&] { accumulator.backward(problem.loss_sum(0, 32).detach(), 32); });
  EXPECT_NE(text.find("expected a loss that requires a gradient"),
            std::string::npos);
  EXPECT_EQ(accumulator.done_count(), 0);
  accumulator.backward(problem.loss_sum(0, 32), 32);
}

TEST(Accumulator, RefusesParametersOfAnotherOpenWindow) {
  Problem problem(torch::kFloat), other(torch::kFloat);
  const auto parameters = problem.net->parameters();
  Accumulator first(parameters);
  Accumulator shared({parameters[0], parameters[0]});
  Accumulator apart(other.net->parameters());
  first.begin(32);
  const auto text = error_of([&] { shared.begin(4); });
  EXPECT_NE(text.find("that another window accumulates into"),
            std::string::npos)
      << text;
  EXPECT_EQ(shared.total_count(), 0);
  apart.begin(4);  // of another model
  first.abandon();
  shared.begin(4);
  shared.abandon();
  {
    Accumulator gone(parameters);
    gone.begin(1);
  }
  Accumulator moved = std::move(first);
  moved.begin(1);
}

}  // namespace
}  // namespace reprise
