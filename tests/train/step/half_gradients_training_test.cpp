// Trainings whose gradients are added up in bfloat16.
#include "train/budget/heavy_mlp.h"
#include "train/budget/plans.h"
#include "train/step/failing_updates.h"

#include <functional>
#include <string>

namespace reprise {
namespace {

using testing::device;
using testing::Ended;
using testing::error_of;
using testing::expect_same;
using testing::expect_trains_within;
using testing::fail_all_over;
using testing::heavy_mlp;
using testing::OwnCache;
using testing::run;

TrainConfig with_half_gradients(int64_t accumulate) {
  TrainConfig config = heavy_mlp();
  config.batch = 2;
  config.accumulate = accumulate;
  config.update = UpdateMode::kAuto;
  config.gradients = GradientSums::kBf16;
  config.clip = 0;
  return config;
}

TrainConfig exact(TrainConfig config) {
  config.gradients = GradientSums::kFp32;
  return config;
}

TEST(HalfGradientsTraining, IsCloseToTheExactTraining) {
  for (const int64_t accumulate : {2, 4}) {
    const auto config = with_half_gradients(accumulate);
    const Ended half = run(config), full = run(exact(config));
    const double loss = full.result.summary.loss.value();
    EXPECT_NEAR(*half.result.summary.loss / loss, 1, 1e-2);
    EXPECT_NE(*half.result.summary.loss, loss);
  }
}

/// Half of the gradients, without those of a stage, which exist in full precision.
TEST(HalfGradientsTraining, NeedsLessMemory) {
  auto config = with_half_gradients(4);
  config.model_options.depth = 32;
  config.recompute = "all";
  const int64_t full = run(exact(config)).result.summary.peak_bytes;
  const int64_t half = run(config).result.summary.peak_bytes;
  const int64_t gradients =
      parameter_count(make_model(config.model, config.model_options)) * 4;
  EXPECT_LT(half, full - gradients / 3);
}

TEST(HalfGradientsTraining, AWindowOfOneMicroBatchIsExact) {
  const auto config = with_half_gradients(1);
  expect_same(run(config), run(exact(config)), "one micro-batch");
}

TEST(HalfGradientsTraining, FitsIntoBudgets) {
  if (device().is_cuda()) GTEST_SKIP() << "sums differ in their last bits";
  const OwnCache cache;
  auto config = with_half_gradients(3);
  config.recompute = "all";
  const int64_t least = run(config).result.summary.peak_bytes;
  config.recompute = "optimal";
  for (const double times : {1.1, 1.5}) {
    auto unlimited = config;
    unlimited.recompute = "";
    expect_trains_within(unlimited, static_cast<int64_t>(times * least));
  }
}

TEST(HalfGradientsTraining, ContinuesResumedRuns) {
  auto config = with_half_gradients(4);
  config.save_every = 1;
  expect_same(run(config, {1, 2, 1}), run(config), "three stops");
}

TEST(HalfGradientsTraining, ContinuesIfMemoryRunsOut) {
  if (!device().is_cpu()) GTEST_SKIP() << "injects CPU allocation failures";
  auto config = with_half_gradients(3);
  config.random_samples = 12;
  const auto outcome = fail_all_over(config, run(config), "gradients", 40);
  EXPECT_GT(outcome.continued, 0);
  EXPECT_EQ(outcome.ended, 0);
}

TEST(HalfGradientsTraining, RefusesWhatItCannotDo) {
  const auto refusal = [](const std::function<void(TrainConfig&)>& change) {
    auto config = with_half_gradients(2);
    change(config);
    return error_of([&] { config.resolve(); });
  };
  const auto expect_refusal = [&](const std::string& text, const auto& change) {
    const std::string error = refusal(change);
    EXPECT_NE(error.find("[--gradients] bf16: "), std::string::npos) << error;
    EXPECT_NE(error.find(text), std::string::npos) << error;
  };
  expect_refusal("--clip", [](auto& c) { c.clip = 1; });
  expect_refusal("--update after",
                 [](auto& c) { c.update = UpdateMode::kAfter; });
  expect_refusal("fp16", [](auto& c) { c.precision = Precision::kFp16; });
}

}  // namespace
}  // namespace reprise
