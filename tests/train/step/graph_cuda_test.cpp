// Tests of trainings with CUDA graphs on a CUDA device.
#include "compat/cuda.h"
#include "compat/cuda_graph.h"
#include "train/step/graph_runs.h"

#include <reprise/recompute/strategy.h>

namespace reprise {
namespace {

using testing::device;
using testing::Ended;
using testing::error_of;
using testing::expect_same;
using testing::expect_same_with_graph;
using testing::images;
using testing::on_device;
using testing::ragged;
using testing::run;
using testing::same;
using testing::small;
using testing::Stepper;
using testing::summed;
using testing::tokens;

#define REPRISE_NEEDS_CUDA()                     \
  if (!device().is_cuda()) {                     \
    GTEST_SKIP() << "graphs need a CUDA device"; \
  }

TEST(GraphCuda, ReplayDoesNotChangeResults) {
  REPRISE_NEEDS_CUDA();
  expect_same_with_graph(small(), "mlp", 2);
  expect_same_with_graph(ragged(small()), "ragged mlp", 2);
  expect_same_with_graph(images(), "cnn-basic", 2);
  expect_same_with_graph(tokens(), "gpt2", 2);
  auto config = tokens();
  config.precision = Precision::kBf16;
  expect_same_with_graph(config, "gpt2 in bf16", 2);
}

TEST(GraphCuda, ReplayDoesNotChangeResultsForAnyStrategy) {
  REPRISE_NEEDS_CUDA();
  for (const char* strategy :
       {"sqrt", "all", "every:2", "checkpoints:2", "revolve:2"}) {
    auto config = ragged(images());
    config.recompute = strategy;
    expect_same_with_graph(config, strategy, 2);
    config = tokens();
    config.recompute = strategy;
    expect_same_with_graph(config, strategy, 2);
  }
}

TEST(GraphCuda, LearningRateAndLossScaleMayChangeBetweenReplays) {
  REPRISE_NEEDS_CUDA();
  auto config = small();
  config.precision = Precision::kFp16;
  config.loss_scale = 1e12;  // the first updates must overflow
  config.epochs = 20;
  config.rate.schedule = LrScheduleKind::kCosine;
  config.rate.warmup_steps = 3;
  config.graph = GraphMode::kOff;
  const Ended plain = run(config);
  config.graph = GraphMode::kOn;
  const Ended graphed = run(config);
  EXPECT_GT(graphed.result.summary.skipped, 0);
  EXPECT_EQ(graphed.result.summary.skipped, plain.result.summary.skipped);
  EXPECT_GT(graphed.result.summary.graph_replays, 0);
  expect_same(graphed, plain, "fp16");
}

TEST(GraphCuda, DisablesGraphsIfAStageSynchronizes) {
  REPRISE_NEEDS_CUDA();
  const compat::GraphStreamScope stream(device(), true);
  torch::nn::Linear linear(4, 4);
  linear->to(device());
  const auto waits =
      make_stage("waits",
                 [linear](const torch::Tensor& x) mutable {
                   return linear->forward(x) * x.sum().item<float>();
                 },
                 {linear.ptr()});
  Stepper stepper(summed(waits), make_schedule("all", 2));
  const Tensors batch = {torch::ones({2, 4}, on_device())};
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(stepper.run(batch));
  ASSERT_EQ(stepper.told.size(), 1u);
  EXPECT_NE(stepper.told[0].find("in stage 0 'waits'"), std::string::npos)
      << stepper.told[0];
  const auto found = linear->weight.grad().clone();
  const auto expected = torch::full({4, 4}, 4 * 2 * 8.f, on_device());
  EXPECT_TRUE(same(found, expected));
}

TEST(GraphCuda, DisablesGraphsIfAStageUsesTheCpuGenerator) {
  REPRISE_NEEDS_CUDA();
  const compat::GraphStreamScope stream(device(), true);
  torch::nn::Linear linear(4, 4);
  linear->to(device());
  const auto draws = make_stage("draws",
                                [linear](const torch::Tensor& x) mutable {
                                  const bool twice =
                                      torch::rand({1}).item<float>() < 0.5;
                                  return linear->forward(x) * (twice ? 2 : 1);
                                },
                                {linear.ptr()});
  Stepper stepper(summed(draws), make_schedule("none", 2));
  const Tensors batch = {torch::ones({2, 4}, on_device())};
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(stepper.run(batch));
  ASSERT_EQ(stepper.told.size(), 1u);
  EXPECT_NE(stepper.told[0].find("random numbers on the CPU"),
            std::string::npos);
}

TEST(GraphCuda, ReplaysAllocateNoMemory) {
  REPRISE_NEEDS_CUDA();
  const compat::GraphStreamScope stream(device(), true);
  torch::nn::Linear linear(64, 64);
  linear->to(device());
  const auto layer =
      make_stage("dropout",
                 [linear](const torch::Tensor& x) mutable {
                   return torch::dropout(linear->forward(x).relu(), 0.1, true);
                 },
                 {linear.ptr()});
  Stepper stepper(summed(layer), make_schedule("all", 2));
  const Tensors batch = {torch::ones({32, 64}, on_device())};
  stepper.run(batch);
  ASSERT_TRUE(stepper.run(batch));
  compat::cuda_synchronize(device().index());
  const auto before = compat::cuda_memory(device().index());
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(stepper.run(batch));
  compat::cuda_synchronize(device().index());
  const auto after = compat::cuda_memory(device().index());
  EXPECT_EQ(after.allocated, before.allocated);
  EXPECT_EQ(after.reserved, before.reserved);
  EXPECT_EQ(stepper.graphs.captures(), 1);
}

TEST(GraphCuda, CapturesOffloadedStages) {
  REPRISE_NEEDS_CUDA();
  auto config = tokens();
  config.model_options.width = 256;  // tensors of a MiB and more
  config.model_options.heads = 4;
  config.model_options.seq = 256;
  // Adam would amplify rounding errors in gradients that are zero, such as
  // those of key biases.
  config.optimizer.name = "sgd";
  const Model model = make_model(config.model, config.model_options);
  std::string forward, backward;
  for (int i = 0; i < model.chain.size(); ++i) {
    // The offloading variant is the last one.
    const auto variant = model.chain[i].variants().size() + 1;
    forward += "K" + std::to_string(i) + "." + std::to_string(variant) + " ";
    const std::string ahead = i > 0 ? "F" + std::to_string(i - 1) + " " : "";
    backward = ahead + "B" + std::to_string(i) + " " + backward;
  }
  const Ended plain = run(config);
  EXPECT_EQ(plain.result.summary.host_bytes, 0);
  config.recompute = forward + backward;
  for (const char* graph : {"off", "auto"}) {
    config.graph = from_text<GraphMode>(graph);
    const Ended moved = run(config);
    EXPECT_GT(moved.result.summary.host_bytes, 1 << 20) << graph;
    EXPECT_LT(moved.result.summary.kept_bytes, plain.result.summary.kept_bytes);
    EXPECT_EQ(moved.result.summary.graph, graph[0] == 'o' ? "off" : "on");
    expect_same(moved, plain, graph);
  }
  config.host_memory = "off";
  EXPECT_NE(error_of([&] { run(config); }).find("expected a variant up to"),
            std::string::npos);
}

TEST(GraphCuda, KeepsTheBudgetWithAGraph) {
  REPRISE_NEEDS_CUDA();
  auto config = images();
  config.graph = GraphMode::kOff;
  compat::release_workspaces(device());  // as planning does
  const auto plain = run(config).result.summary;
  config.recompute = "optimal";
  config.memory_limit = plain.peak_bytes + (int64_t{256} << 20);
  config.graph = GraphMode::kAuto;
  const auto s = run(config).result.summary;
  EXPECT_EQ(s.graph, "on");
  EXPECT_LE(s.peak_bytes, s.limit_bytes);
  EXPECT_GE(s.peak_bytes, plain.peak_bytes / 2);
}

}  // namespace
}  // namespace reprise
