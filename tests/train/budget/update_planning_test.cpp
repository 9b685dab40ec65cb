// Plans of trainings that update parameters in the backward.
#include "plans.h"
#include "train/runs.h"

#include <reprise/train/planning.h>

namespace reprise {
namespace {

using testing::expect_trains_within;
using testing::OwnCache;
using testing::request_for;
using testing::run;

TrainConfig whole_window_of(const std::string& model) {
  TrainConfig config = testing::small(model);
  config.model_options.dropout = -1;
  config.random_samples = 16;
  config.batch = 4;
  config.accumulate = 1;
  config.epochs = 0;
  config.steps = 4;
  ModelOptions& m = config.model_options;
  if (model == "gpt2") {
    m.depth = 3;
    m.width = 64;
    m.vocab = 256;
    m.seq = 32;
  } else if (model == "mlp") {
    m.depth = 12;
    m.width = 256;
  } else {
    m.width = 8;
    m.image_size = 32;
  }
  return config;
}

TEST(UpdatePlanning, PredictsPeaks) {
  const OwnCache cache;
  PlanningOptions quick;
  quick.quick = true;
  for (const std::string model : {"mlp", "gpt2", "gpt2 copies", "resnet18"}) {
    TrainConfig config =
        whole_window_of(model == "gpt2 copies" ? "gpt2" : model);
    if (model == "gpt2 copies") {
      config.precision = Precision::kBf16;
      config.weight_copies = WeightCopiesMode::kOn;
    }
    config.update = UpdateMode::kBackward;
    for (const char* optimizer : {"adamw", "sgd", "adafactor", "adamw8bit"}) {
      config.optimizer.name = optimizer;
      for (const char* strategy : {"none", "all", "sqrt"}) {
        TrainConfig open = config;
        open.resolve();
        PlanRequest request = request_for(open, 0);
        request.strategy = strategy;
        const PlanResult result = plan_training(open, request, quick);
        ASSERT_EQ(result.plan.update, UpdateMode::kBackward);
        const PlanMeasurement measured =
            measure_plan(open, result.plan, 0, /*windows=*/1);
        const std::string what = model + " " + optimizer + " " + strategy;
        const double ratio =
            double(result.plan.peak_bytes) / double(measured.peak_bytes);
        EXPECT_NEAR(ratio, 1, 0.03) << what;
      }
    }
  }
}

/// The mlp needs most of its memory for parameters and gradients, so that a budget below both
/// leaves only the update in the backward.
TEST(UpdatePlanning, UpdatesInTheBackwardIfOnlyThatFits) {
  const OwnCache cache;
  TrainConfig config = whole_window_of("mlp");
  // Workspaces of libraries must not be most of the memory.
  if (testing::device().is_cuda()) config.model_options.width = 1536;
  config.optimizer.name = "sgd";
  config.state = StatePlace::kDevice;
  TrainConfig open = config;
  open.update = UpdateMode::kAfter;
  open.resolve();
  PlanningOptions quick;
  quick.quick = true;
  const auto smallest = [&](UpdateMode update) {
    open.update = update;
    return plan_training(open, request_for(open, 1), quick).smallest_bytes;
  };
  const int64_t after = smallest(UpdateMode::kAfter);
  const int64_t backward = smallest(UpdateMode::kBackward);
  EXPECT_EQ(smallest(UpdateMode::kAuto), std::min(after, backward));
  ASSERT_LT(backward, after * 3 / 4);

  expect_trains_within(config, (after + backward) / 2);

  // With two micro-batches per window it is not possible.
  open.update = UpdateMode::kAuto;
  PlanRequest two = request_for(open, (after + backward) / 2);
  two.micro_batch = open.batch / 2;
  EXPECT_EQ(plan_training(open, two, quick).plan.update, UpdateMode::kAfter);
  EXPECT_FALSE(plan_training(open, two, quick).feasible);
}

/// On a device that all gradients do not fit on, updates are measured one stage at a time.
TEST(UpdatePlanning, MeasuresUpdatesThatFitInPartsOnly) {
  if (testing::device().is_cuda()) GTEST_SKIP() << "fails on the CPU only";
  const OwnCache cache;
  TrainConfig config = whole_window_of("mlp");
  config.update = UpdateMode::kBackward;
  config.resolve();
  PlanningOptions quick;
  quick.quick = true;
  const auto plan = [&](bool fails) {
    TrainingPlanner planner(config, quick);
    std::optional<AllocationFailure> failure;
    // The first tensor of the size of the largest parameter is a copy of it, the second one
    // its gradient.
    if (fails) failure.emplace(1, int64_t{784} * 256 * 4);
    const PlanResult result = planner.plan(request_for(config, 0));
    if (fails) {
      EXPECT_TRUE(failure->happened());
    }
    return result.plan;
  };
  const Plan expected = plan(false);
  const Plan got = plan(true);
  EXPECT_EQ(got.peak_bytes, expected.peak_bytes);
  EXPECT_EQ(got.peak.optimizer, expected.peak.optimizer);
  EXPECT_GT(got.step_ms, 0);
}

/// A listener that needs gradients gets a plan with the update after the backward.
TEST(UpdatePlanning, LeavesGradientsToListeners) {
  const OwnCache cache;
  struct Counter : TrainListener {
    void gradients_ready(int64_t, const NamedTensors& parameters) override {
      ++calls;
      for (const auto& item : parameters) {
        EXPECT_TRUE(item.second.grad().defined()) << item.first;
      }
    }
    int calls = 0;
  } counter;
  TrainConfig config = whole_window_of("gpt2");
  config.optimizer.name = "sgd";
  config.memory_limit = [&] {
    TrainConfig open = config;
    open.update = UpdateMode::kAfter;
    open.resolve();
    return plan_training(open, request_for(open, 1)).smallest_bytes;
  }();
  run(config, {}, &counter);
  EXPECT_EQ(counter.calls, 4);
}

}  // namespace
}  // namespace reprise
