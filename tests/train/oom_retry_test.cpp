// Allocations fail at random places of a training; it ends with the same bits.
#include "runs.h"

#include <algorithm>
#include <cstdio>
#include <random>

namespace reprise {
namespace {

using testing::device;
using testing::Ended;
using testing::error_of;
using testing::expect_same;
using testing::Failing;
using testing::run;
using testing::small;
using testing::Warnings;

TrainConfig saved_images() {
  auto config = small("cnn-basic");
  config.model_options.norm = "batch";
  config.model_options.image_size = 28;
  config.random_samples = 40;
  config.batch = 8;
  config.accumulate = 2;
  config.epochs = 1;
  config.optimizer.name = "adam";
  config.optimizer.weight_decay = 0.01;
  config.clip = 0.5;
  config.save_every = 2;
  config.evaluate = true;
  config.eval_every = 2;
  return config;
}

TrainConfig ragged_images() {
  auto config = saved_images();
  config.recompute = "all";
  config.batch = 6;
  config.accumulate = 0;
  config.global_batch = 16;  // 6, 6, 4
  return config;
}

TrainConfig dropped_tokens() {
  auto config = small("gpt2");
  config.model_options.depth = 2;
  config.model_options.width = 16;
  config.model_options.heads = 2;
  config.model_options.vocab = 50;
  config.model_options.seq = 8;
  config.model_options.dropout = 0.3;
  config.recompute = "sqrt";
  config.clip = 0.5;
  return config;
}

/// Fails `points` times, each in a run of its own, evenly spread with chance.
void fail_everywhere(const TrainConfig& config, int points,
                     const std::vector<int>& stops = {}) {
  if (!device().is_cpu()) GTEST_SKIP() << "failures are injected on the CPU";
  const size_t part = stops.size();
  const Ended whole = run(config, stops, nullptr, {.part = part});
  ASSERT_GT(whole.allocations, 10 * points);
  std::mt19937 chance(1);
  int rescued = 0;
  for (int i = 0; i < points; ++i) {
    const int64_t from = whole.allocations * i / points;
    const int64_t to = whole.allocations * (i + 1) / points;
    const int64_t after =
        from +
        static_cast<int64_t>(chance() % static_cast<uint64_t>(to - from));
    Warnings warnings;
    const Ended ended =
        run(config, stops, &warnings, {.part = part, .after = after});
    expect_same(ended, whole, "allocation " + std::to_string(after));
    // A batch that was read ahead and never asked for may be what failed.
    EXPECT_LE(warnings.list.size(), 1u);
    rescued += warnings.count("ran out of memory") > 0;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(rescued, points * 3 / 4);
  std::printf("%d points of %ld allocations, %d noticed\n", points,
              static_cast<long>(whole.allocations), rescued);
}

TEST(OomRetry, BatchNormAndClippingAreTheSame) {
  fail_everywhere(saved_images(), 30);
}

TEST(OomRetry, ASmallerLastMicroBatchAndRecomputationAreTheSame) {
  fail_everywhere(ragged_images(), 30);
}

TEST(OomRetry, DropoutIsTheSame) {
  fail_everywhere(dropped_tokens(), 30);
}

TEST(OomRetry, OtherOptimizersAreTheSame) {
  for (const char* name : {"sgd", "adafactor", "adam8bit"}) {
    auto config = dropped_tokens();
    config.model_options.width = 32;  // enough for 8 bits
    config.optimizer.name = name;
    config.optimizer.momentum = name == std::string("sgd") ? 0.9 : 0;
    fail_everywhere(config, 10);
  }
}

TEST(OomRetry, AWindowContinuedFromDiskIsTheSame) {
  auto config = ragged_images();
  config.evaluate = false;
  fail_everywhere(config, 20, {4});  // one micro-batch into the second window
}

/// A state whose reading fails for want of memory is no state to pass over.
TEST(OomRetry, ResumingItselfCanFail) {
  if (!device().is_cpu()) GTEST_SKIP() << "failures are injected on the CPU";
  auto config = small();
  config.workers = 0;
  config.save_every = 1;
  const Ended whole = run(config);
  for (int64_t after = 0; after < 100; ++after) {
    Warnings warnings;
    expect_same(run(config, {3}, &warnings, {.part = 1, .after = after}), whole,
                "allocation " + std::to_string(after));
    EXPECT_EQ(warnings.count("passed over"), 0) << after;
    EXPECT_EQ(warnings.count("ran out of memory"), 1) << after;
  }
}

TEST(OomRetry, TheLastUpdateAndTheSaveCanFail) {
  if (!device().is_cpu()) GTEST_SKIP() << "failures are injected on the CPU";
  auto config = saved_images();
  config.evaluate = false;
  config.random_samples = 16;
  config.workers = 0;
  const Ended whole = run(config);
  ASSERT_EQ(whole.result.summary.steps, 1);
  // From the run's end backwards: saving, the update with its first state.
  for (int64_t before_end = 1; before_end < 60; before_end += 3) {
    expect_same(
        run(config, {}, nullptr, {.after = whole.allocations - before_end}),
        whole, std::to_string(before_end) + " before the end");
  }
}

/// Trains; before micro-batch `at` of the run memory runs out as on a GPU.
Ended run_failing_before(TrainConfig config, int at) {
  const testing::TemporaryDirectory base;
  config.resolve();
  auto directory = RunDirectory::create(base.path() + "/run", config);
  TrainRun how;
  how.directory = &directory;
  how.stop = [left = at]() mutable {
    if (left-- == 0) {
      C10_THROW_ERROR(OutOfMemoryError, "CUDA out of memory. (for the test)");
    }
    return false;
  };
  Ended ended;
  ended.result = Trainer(make_inputs(config), config).run(how);
  const auto saved = directory.newest([](const auto&) { FAIL(); });
  ended.tensors = saved->tensors;
  ended.tensors.emplace_back(
      "scale", torch::scalar_tensor(saved->state.scaler.scale, torch::kDouble));
  ended.metrics = read_text(directory.metrics_path());
  return ended;
}

/// On any device, and in fp16 where there is one.
TEST(OomRetry, FailuresBetweenMicroBatchesChangeNothing) {
  auto config = ragged_images();
  config.evaluate = false;
  for (const char* precision : {"fp32", "bf16", "fp16"}) {
    if (device().is_cpu() && precision == std::string("fp16")) continue;
    config.precision = from_text<Precision>(precision);
    const Ended whole = run_failing_before(config, -1);
    for (int at = 0; at < 8; ++at) {
      expect_same(run_failing_before(config, at), whole,
                  precision + (" before " + std::to_string(at)));
    }
  }
}

TEST(OomRetry, GivesUpWithTheLastGoodStateOnDisk) {
  const testing::TemporaryDirectory base;
  auto config = small();
  config.steps = 4;
  config.epochs = 0;
  config.workers = 0;
  config.resolve();
  auto directory = RunDirectory::create(base.path() + "/run", config);
  Warnings warnings;
  TrainRun how;
  how.directory = &directory;
  how.listener = &warnings;
  int asked = 0;
  how.stop = [&asked] {
    // Two micro-batches a window: the third window never gets through.
    if (++asked > 4) {
      C10_THROW_ERROR(OutOfMemoryError, "CUDA out of memory. (for the test)");
    }
    return false;
  };
  const std::string error =
      error_of([&] { Trainer(make_inputs(config), config).run(how); });
  EXPECT_NE(error.find("8 times in a row update 3 ran out of memory: CUDA out "
                       "of memory. (for the test)"),
            std::string::npos)
      << error;
  EXPECT_EQ(warnings.count("update 3 ran out of memory"), 7);

  const auto saved = directory.newest([](const auto&) { FAIL(); });
  ASSERT_TRUE(saved.has_value());
  EXPECT_EQ(saved->state.step, 2);
  EXPECT_EQ(saved->state.micro, 0);
  how.resume = true;
  how.stop = {};
  EXPECT_EQ(Trainer(make_inputs(config), config).run(how).summary.steps, 4);
  Ended ended;
  ended.tensors = directory.newest([](const auto&) { FAIL(); })->tensors;
  ended.metrics = read_text(directory.metrics_path());
  expect_same(ended, run(config), "after giving up");
}

}  // namespace
}  // namespace reprise
