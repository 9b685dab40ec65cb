// Trainings whose linear weights are in bfloat16.
#include "train/budget/heavy_mlp.h"
#include "train/budget/plans.h"
#include "train/optim/partial_optimizer.h"
#include "train/step/graph_runs.h"

#include <reprise/train/optimizer.h>

#include <functional>
#include <string>

namespace reprise {
namespace {

using testing::device;
using testing::Ended;
using testing::error_of;
using testing::expect_same;
using testing::expect_trains_within;
using testing::heavy_mlp;
using testing::OwnCache;
using testing::run;
using testing::tokens;
using testing::Warnings;

TrainConfig with_half_parameters(TrainConfig config) {
  config.precision = Precision::kBf16;
  config.parameters = ParameterType::kBf16;
  return config;
}

TrainConfig in_full(TrainConfig config) {
  config.parameters = ParameterType::kFp32;
  return config;
}

TEST(HalfParametersTraining, IsCloseToTheExactTraining) {
  for (const char* optimizer : {"adamw", "sgd"}) {
    for (auto base : {heavy_mlp(), tokens()}) {
      base.optimizer.name = optimizer;
      const auto config = with_half_parameters(base);
      const Ended half = run(config), full = run(in_full(config));
      const double loss = full.result.summary.loss.value();
      EXPECT_NEAR(*half.result.summary.loss / loss, 1, 3e-2) << optimizer;
      int converted = 0;
      for (const auto& [name, tensor] : half.tensors) {
        const bool state = name.find("exp_avg") != std::string::npos;
        EXPECT_FALSE(state && tensor.scalar_type() == torch::kBFloat16) << name;
        converted += tensor.scalar_type() == torch::kBFloat16 ? 1 : 0;
      }
      EXPECT_GT(converted, 1);
    }
  }
}

TEST(HalfParametersTraining, NeedsLessMemory) {
  auto config = with_half_parameters(heavy_mlp());
  config.model_options.depth = 32;
  config.recompute = "all";
  const int64_t full = run(in_full(config)).result.summary.peak_bytes;
  const int64_t half = run(config).result.summary.peak_bytes;
  const int64_t parameters =
      parameter_count(make_model(config.model, config.model_options)) * 4;
  EXPECT_LT(half, full - parameters / 3);
}

/// Updates that are smaller than half of a bfloat16's last bit add up.
TEST(HalfParametersTraining, SmallUpdatesAreNotLost) {
  const torch::Tensor weight =
      torch::ones({64, 64}, torch::dtype(torch::kBFloat16).device(device()))
          .requires_grad_();
  OptimizerOptions options;
  options.name = "sgd";
  const auto optimizer = make_optimizer(options, {{"weight", weight}});
  dynamic_cast<detail::PartialOptimizer&>(*optimizer).round_stochastically();
  for (int i = 0; i < 50; ++i) {
    weight.mutable_grad() =
        torch::ones({64, 64}, torch::dtype(torch::kFloat).device(device()));
    optimizer->step(1e-4);
  }
  // 1 - 50e-4; the last bit of numbers below 1 is 1/256, and steps are 1/39 of it.
  EXPECT_NEAR(weight.detach().to(torch::kFloat).mean().item<double>(), 0.995,
              5e-4);
}

TEST(HalfParametersTraining, ContinuesResumedRuns) {
  auto config = with_half_parameters(tokens());
  config.save_every = 1;
  expect_same(run(config, {1, 2, 1}), run(config), "three stops");
}

TEST(HalfParametersTraining, UpdatesInTheBackwardAreTheSame) {
  auto config = with_half_parameters(tokens());
  config.batch = 8;
  config.accumulate = 1;
  config.clip = 0;
  config.update = UpdateMode::kAfter;
  const Ended after = run(config);
  config.update = UpdateMode::kBackward;
  expect_same(run(config), after, "in the backward");
}

TEST(HalfParametersTraining, FitsIntoBudgets) {
  if (device().is_cuda()) GTEST_SKIP() << "sums differ in their last bits";
  const OwnCache cache;
  auto config = with_half_parameters(heavy_mlp());
  config.recompute = "all";
  const int64_t least = run(config).result.summary.peak_bytes;
  for (const double times : {1.1, 1.5}) {
    auto unlimited = config;
    unlimited.recompute = "";
    expect_trains_within(unlimited, static_cast<int64_t>(times * least));
  }
}

TEST(HalfParametersTraining, RepeatsWindowsThatFail) {
  if (!device().is_cpu()) GTEST_SKIP() << "injects CPU allocation failures";
  auto config = with_half_parameters(heavy_mlp());
  const Ended plain = run(config);
  Warnings warnings;
  const int64_t all = run(config, {}, nullptr, {0}).allocations;
  for (int i = 1; i < 12; ++i) {
    expect_same(run(config, {}, &warnings, {0, all * i / 12}), plain,
                "failure " + std::to_string(i));
  }
}

TEST(HalfParametersTraining, RefusesWhatItCannotDo) {
  const auto refusal = [](const std::function<void(TrainConfig&)>& change) {
    auto config = with_half_parameters(tokens());
    change(config);
    return error_of([&] { config.resolve(); });
  };
  const auto expect = [](const std::string& error, const std::string& part) {
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };
  expect(refusal([](auto& c) { c.precision = Precision::kFp32; }),
         "[--parameters] bf16: it needs --precision bf16");
  expect(refusal([](auto& c) { c.ranks = 2; }), "[--parameters] bf16: several");
  expect(refusal([](auto& c) { c.optimizer.name = "adafactor"; }),
         "[--parameters] bf16: --optimizer adafactor");
  expect(refusal([](auto& c) { c.weight_copies = WeightCopiesMode::kOff; }),
         "[--parameters] bf16: --weight-copies off");
  expect(refusal([](auto& c) { c.state = StatePlace::kHost; }),
         "[--state] host: --parameters bf16");
}

}  // namespace
}  // namespace reprise
