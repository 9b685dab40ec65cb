// Tests of trainings with CUDA graphs. They run on any device with a fake that
// repeats the step instead of launching a CUDA graph. This covers static
// inputs, the weight in device memory, gradients that keep their address, and
// the decision when to capture. graph_cuda_test.cpp tests real CUDA graphs.
#include "compat/cuda.h"
#include "compat/cuda_graph.h"
#include "train/step/graph_runs.h"

#include <reprise/accumulate/accumulator.h>
#include <reprise/recompute/strategy.h>

#include <algorithm>

namespace reprise {
namespace {

using detail::MicroStep;
using detail::Recorded;
using detail::RecordedInstead;
using detail::StepGraphs;
using testing::device;
using testing::Ended;
using testing::error_of;
using testing::expect_same;
using testing::expect_same_with_graph;
using testing::Failing;
using testing::images;
using testing::on_device;
using testing::ragged;
using testing::repeated;
using testing::run;
using testing::same;
using testing::small;
using testing::Stepper;
using testing::summed;
using testing::tokens;
using testing::Warnings;

TEST(Graph, ReplayDoesNotChangeResults) {
  if (device().is_cuda()) GTEST_SKIP() << "with real graphs there";
  const RecordedInstead instead(repeated());
  expect_same_with_graph(small(), "mlp", 2);  // micro-batches of 4 and 2
  expect_same_with_graph(ragged(small()), "ragged mlp", 2);
  expect_same_with_graph(images(), "cnn-basic", 2);
  expect_same_with_graph(tokens(), "gpt2", 2);
}

TEST(Graph, ReplayDoesNotChangeResultsForAnyStrategy) {
  if (device().is_cuda()) GTEST_SKIP() << "with real graphs there";
  const RecordedInstead instead(repeated());
  for (const char* strategy : {"sqrt", "all", "every:2", "revolve:2"}) {
    auto config = ragged(images());
    config.recompute = strategy;
    expect_same_with_graph(config, strategy, 2);
    config = tokens();  // has a weight that two stages share
    config.recompute = strategy;
    expect_same_with_graph(config, strategy, 2);
  }
}

TEST(Graph, ReplayDoesNotChangeResumedRuns) {
  const auto check = [](const std::string& what) {
    auto config = ragged(small());
    config.rate.schedule = LrScheduleKind::kCosine;
    config.rate.warmup_steps = 2;
    config.graph = GraphMode::kOff;
    const Ended plain = run(config);
    config.graph = GraphMode::kAuto;
    for (const int stop : {0, 1, 5, 7, 12}) {
      expect_same(run(config, {stop}), plain,
                  what + ", stopped after " + std::to_string(stop));
    }
    expect_same(run(config, {7, 8, 4}), plain, what + ", three stops");
  };
  if (device().is_cuda()) {
    check("graphs");
  } else {
    const RecordedInstead instead(repeated());
    check("stand-ins");
  }
}

TEST(Graph, EvaluationDoesNotChangeResults) {
  const auto check = [] {
    auto config = images();
    config.graph = GraphMode::kOff;
    const Ended plain = run(config);
    config.graph = GraphMode::kAuto;
    config.evaluate = true;
    config.eval_every = 1;
    const Ended evaluated = run(config);
    EXPECT_GT(evaluated.result.summary.graph_replays, 0);
    ASSERT_EQ(evaluated.tensors.size(), plain.tensors.size());
    for (size_t i = 0; i < plain.tensors.size(); ++i) {
      EXPECT_TRUE(same(evaluated.tensors[i].second, plain.tensors[i].second))
          << plain.tensors[i].first;
    }
  };
  if (device().is_cuda()) {
    check();
  } else {
    const RecordedInstead instead(repeated());
    check();
  }
}

TEST(Graph, ReportsAFailedCaptureAndContinuesWithout) {
  auto config = ragged(small());
  config.graph = GraphMode::kOff;
  const Ended plain = run(config);
  config.graph = GraphMode::kAuto;
  for (const int which : {1, 2}) {  // the capture that fails
    int fails = which;
    const RecordedInstead instead(repeated(&fails));
    Warnings warnings;
    const Ended ended = run(config, {}, &warnings);
    expect_same(ended, plain, "after a failed capture");
    EXPECT_EQ(warnings.count("without a CUDA graph: cannot be captured"), 1);
    EXPECT_EQ(ended.result.summary.graph, "off: cannot be captured");
    EXPECT_EQ(ended.result.summary.graph_captures, which - 1);
  }
}

TEST(Graph, RepeatsTheWindowWhenMemoryRunsOut) {
  if (device().is_cuda()) GTEST_SKIP() << "failures are injected on the CPU";
  const RecordedInstead instead(repeated());
  auto config = ragged(small());
  config.workers = 0;
  config.graph = GraphMode::kOff;
  const Ended plain = run(config);
  config.graph = GraphMode::kAuto;
  const int64_t all = run(config, {}, nullptr, {0}).allocations;
  ASSERT_GT(all, 100);
  for (int i = 1; i < 12; ++i) {
    Warnings warnings;
    const Ended ended = run(config, {}, &warnings, Failing{0, all * i / 12});
    expect_same(ended, plain, "failed at " + std::to_string(i) + " twelfths");
    EXPECT_FALSE(warnings.list.empty());
  }
}

TEST(Graph, RequiresACudaDeviceIfOn) {
  auto config = small();
  config.device = "cpu";
  config.graph = GraphMode::kOn;
  config.resolve();
  EXPECT_NE(error_of([&] {
              Trainer(make_inputs(config), config);
            }).find("[--graph] on needs a CUDA device"),
            std::string::npos);
  config.graph = GraphMode::kAuto;
  EXPECT_EQ(Trainer(make_inputs(config), config).run({}).summary.graph, "off");
}

TEST(Graph, CapturesTheSecondBatchOfAShape) {
  const RecordedInstead instead(repeated());
  torch::nn::Linear linear(4, 4);
  linear->to(device());
  Stepper stepper(summed(make_stage("linear", linear)),
                  make_schedule("none", 2));
  const auto batch = [](int64_t n) -> Tensors {
    return {torch::ones({n, 4}, on_device())};
  };
  EXPECT_FALSE(stepper.run(batch(1)));
  EXPECT_FALSE(stepper.run(batch(2)));
  EXPECT_TRUE(stepper.run(batch(1)));
  EXPECT_TRUE(stepper.run(batch(1)));
  EXPECT_EQ(stepper.graphs.captures(), 1);
  EXPECT_EQ(stepper.graphs.replays(), 2);
  EXPECT_TRUE(stepper.run(batch(2)));
  // There are at most kMost CUDA graphs.
  for (int64_t n = 3; n < 10; ++n) {
    EXPECT_FALSE(stepper.run(batch(n)));
    EXPECT_EQ(stepper.run(batch(n)),
              n <= static_cast<int64_t>(StepGraphs::kMost));
  }
  EXPECT_EQ(stepper.graphs.captures(), int64_t{StepGraphs::kMost});

  // If gradients move, the CUDA graphs are dropped.
  for (auto& parameter : linear->parameters()) {
    parameter.mutable_grad() = parameter.grad().clone();
  }
  EXPECT_FALSE(stepper.run(batch(1)));
  EXPECT_TRUE(stepper.run(batch(1)));
  stepper.graphs.drop();
  EXPECT_FALSE(stepper.run(batch(1)));
  EXPECT_TRUE(stepper.run(batch(1)));
  EXPECT_TRUE(stepper.told.empty());
}

TEST(Graph, DetectsAnOverflowInOneWindowOnly) {
  const auto check = [] {
    const compat::GraphStreamScope stream(device(), true);
    torch::nn::Linear linear(4, 4);
    linear->to(device());
    const auto parameters = linear->parameters();
    Stepper stepper(summed(make_stage("linear", linear)),
                    make_schedule("all", 2));
    Accumulator accumulator(parameters);
    accumulator.keep_gradients(true);
    GradScaler scaler;
    const Tensors batch = {torch::ones({2, 4}, on_device())};
    torch::Tensor expected;
    for (int window = 0; window < 6; ++window) {
      const bool overflows = window == 3;
      accumulator.begin(2);
      // 1e39 overflows a float.
      stepper.step.set_weight(accumulator.weigh(2) *
                              (overflows ? 1e39 : scaler.scale()));
      EXPECT_EQ(stepper.run(batch), window > 0);
      EXPECT_EQ(scaler.unscale(parameters), !overflows) << window;
      const auto gradient = linear->weight.grad().clone();
      if (window == 0) expected = gradient;
      if (!overflows) {
        EXPECT_TRUE(same(gradient, expected)) << window;
      }
      accumulator.update([] {});
      scaler.update();
    }
    EXPECT_EQ(scaler.state().skipped, 1);
    EXPECT_EQ(stepper.graphs.captures(), 1);
  };
  if (device().is_cuda()) {
    check();
  } else {
    const RecordedInstead instead(repeated());
    check();
  }
}

TEST(Graph, IsDisabledIfItExceedsTheBudget) {
  struct Large final : Recorded {
    void capture(const std::function<void()>&) override {}
    void replay() override { FAIL(); }
    int64_t bytes() const override { return int64_t{1} << 50; }
  };
  const RecordedInstead instead([] { return std::make_unique<Large>(); });
  torch::nn::Linear linear(4, 4);
  linear->to(device());
  Stepper stepper(summed(make_stage("linear", linear)),
                  make_schedule("none", 2));
  stepper.graphs.set_limit(int64_t{1} << 40);
  const Tensors batch = {torch::ones({2, 4}, on_device())};
  EXPECT_FALSE(stepper.run(batch));
  EXPECT_FALSE(stepper.run(batch));
  EXPECT_FALSE(stepper.graphs.active());
  ASSERT_EQ(stepper.told.size(), 1u);
  EXPECT_NE(stepper.told[0].find("the budget is"), std::string::npos);
  EXPECT_EQ(stepper.graphs.bytes(), 0);
  EXPECT_EQ(stepper.graphs.peak_bytes(), 0);  // it was never replayed
  stepper.graphs.drop();                      // enables CUDA graphs again
  EXPECT_TRUE(stepper.graphs.active());
}

TEST(Graph, CountsTransientMemoryBetweenSteps) {
  const RecordedInstead instead(repeated());
  for (const bool room : {true, false}) {
    torch::nn::Linear linear(4, 4);
    linear->to(device());
    Stepper stepper(summed(make_stage("linear", linear)),
                    make_schedule("none", 2));
    stepper.graphs.set_limit(int64_t{1} << 40);
    stepper.graphs.note_between(int64_t{1} << (room ? 30 : 40));
    const Tensors batch = {torch::ones({2, 4}, on_device())};
    EXPECT_FALSE(stepper.run(batch));
    EXPECT_EQ(stepper.run(batch), room);
    EXPECT_EQ(stepper.graphs.active(), room);
  }
}

TEST(Graph, CountsItsMemoryAsLive) {
  struct Held final : Recorded {
    void capture(const std::function<void()>&) override {}
    void replay() override {}
    int64_t bytes() const override { return int64_t{1} << 40; }
  };
  const RecordedInstead instead([] { return std::make_unique<Held>(); });
  torch::nn::Linear linear(4, 4);
  linear->to(device());
  Stepper stepper(summed(make_stage("linear", linear)),
                  make_schedule("none", 2));
  const Tensors batch = {torch::ones({2, 4}, on_device())};
  stepper.run(batch);
  EXPECT_EQ(stepper.graphs.peak_bytes(), 0);
  EXPECT_TRUE(stepper.run(batch));
  const int64_t held = int64_t{1} << 40;
  EXPECT_EQ(stepper.graphs.bytes(), held);
  const int64_t peak = stepper.graphs.peak_bytes();
  EXPECT_GT(peak, held);
  const int64_t more = int64_t{1} << 20;
  torch::empty({more}, on_device(torch::kByte));
  EXPECT_GE(stepper.graphs.peak_bytes(), peak + more);
  stepper.graphs.drop();
  EXPECT_EQ(stepper.graphs.bytes(), 0);
  EXPECT_GE(stepper.graphs.peak_bytes(), peak + more);
  stepper.graphs.restart_peak();
  EXPECT_EQ(stepper.graphs.peak_bytes(), 0);
}

/// Plans "none" first, then the strategies of a list.
class Listed final : public BudgetPlanner {
 public:
  Listed(const TrainConfig& config, std::vector<std::string> later,
         bool graph = true)
      : config_(config), later_(std::move(later)), graph_(graph) {}
  Plan decide() override { return plan("none"); }
  std::optional<Plan> tighten(const Plan&, int64_t) override {
    if (next_ == later_.size()) return std::nullopt;
    return plan(later_[next_++]);
  }

 private:
  Plan plan(const std::string& strategy) const {
    const int stages =
        make_model(config_.model, config_.model_options).chain.size();
    return {.micro_batch = config_.batch,
            .accumulate = config_.accumulate,
            .schedule = make_schedule(strategy, stages),
            .peak_bytes = 1,
            .step_ms = 1,
            .graph = graph_};
  }
  TrainConfig config_;
  std::vector<std::string> later_;
  bool graph_;
  size_t next_ = 0;
};

TEST(Graph, IsCapturedAgainAfterReplanning) {
  const auto check = [] {
    auto config = small();
    config.epochs = 4;
    config.memory_limit = 1;  // always exceeded, so each window replans
    config.recompute = "optimal";
    const auto planner = [config]() mutable {
      config.resolve();
      return std::make_unique<Listed>(
          config, std::vector<std::string>{"sqrt", "none", "all"});
    };
    const Ended plain = run(config, {}, nullptr, {}, planner);
    config.graph = GraphMode::kOn;
    const Ended graphed = run(config, {}, nullptr, {}, planner);
    expect_same(graphed, plain, "planned again");
    EXPECT_EQ(graphed.result.summary.replans, 3);
    EXPECT_EQ(graphed.result.summary.graph, "on");
    EXPECT_GT(graphed.result.summary.graph_replays, 0);
  };
  if (device().is_cuda()) {
    check();
  } else {
    const RecordedInstead instead(repeated());
    check();
  }
}

TEST(Graph, IsDisabledBeforeReplanning) {
  struct Large final : Recorded {
    void capture(const std::function<void()>&) override {}
    void replay() override { FAIL(); }
    int64_t bytes() const override { return int64_t{1} << 50; }
  };
  const RecordedInstead instead([] { return std::make_unique<Large>(); });
  auto config = small();
  config.memory_limit = int64_t{1} << 40;
  config.recompute = "optimal";
  const auto planner = [config]() mutable {
    config.resolve();
    return std::make_unique<Listed>(config, std::vector<std::string>{"all"});
  };
  const Ended plain = run(config, {}, nullptr, {}, planner);
  config.graph = GraphMode::kAuto;
  Warnings warnings;
  const Ended ended = run(config, {}, &warnings, {}, planner);
  expect_same(ended, plain, "no room for a graph");
  EXPECT_EQ(warnings.count("the budget is"), 1);
  EXPECT_EQ(ended.result.summary.replans, 0);
  EXPECT_LT(ended.result.summary.peak_bytes, config.memory_limit);
}

TEST(Graph, IsDisabledIfThePlanHasNoRoom) {
  const RecordedInstead instead(repeated());
  auto config = small();
  config.batch = 8;
  config.accumulate = 1;
  config.recompute = "optimal";
  for (const bool room : {false, true}) {
    config.memory_limit = int64_t{1} << 40;
    const auto planner = [config, room]() mutable {
      config.resolve();
      return std::make_unique<Listed>(config, std::vector<std::string>{}, room);
    };
    config.graph = GraphMode::kOff;
    const Ended plain = run(config, {}, nullptr, {}, planner);
    config.graph = GraphMode::kAuto;
    const Ended ended = run(config, {}, nullptr, {}, planner);
    expect_same(ended, plain, room ? "with room" : "without room");
    const std::string& graph = ended.result.summary.graph;
    EXPECT_EQ(graph == "on", room) << graph;
    EXPECT_EQ(graph.find("leaves no room") != std::string::npos, !room);
  }
}

TEST(Graph, IsDisabledAfterMemoryRanOutTwice) {
  const RecordedInstead instead(repeated());
  torch::nn::Linear linear(4, 4);
  linear->to(device());
  Stepper stepper(summed(make_stage("linear", linear)),
                  make_schedule("none", 2));
  const Tensors batch = {torch::ones({2, 4}, on_device())};
  stepper.graphs.drop_for_memory();  // does not count without CUDA graphs
  stepper.run(batch);
  EXPECT_TRUE(stepper.run(batch));
  stepper.graphs.drop_for_memory();
  EXPECT_FALSE(stepper.run(batch));
  EXPECT_TRUE(stepper.run(batch));
  stepper.graphs.drop_for_memory();
  EXPECT_FALSE(stepper.graphs.active());
  EXPECT_EQ(stepper.told.size(), 1u);
}

}  // namespace
}  // namespace reprise
