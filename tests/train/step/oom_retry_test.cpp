// Tests of whole trainings in which allocations fail at random points; the
// results must be bit-identical. retry_rules_test.cpp tests OomRetry in
// isolation.
#include "train/runs.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
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

/// Trains `points` times, with one failed allocation each. The failures are
/// spread evenly over the run, with random offsets.
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
    // The failure may be in a batch that was read ahead but not used.
    EXPECT_LE(warnings.list.size(), 1u);
    rescued += warnings.count("ran out of memory") > 0;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(rescued, points * 3 / 4);
  std::printf("%d points of %ld allocations, %d noticed\n", points,
              static_cast<long>(whole.allocations), rescued);
}

TEST(OomRetry, DoesNotChangeBatchNormAndClipping) {
  fail_everywhere(saved_images(), 30);
}

TEST(OomRetry, DoesNotChangeASmallerLastMicroBatchAndRecomputation) {
  fail_everywhere(ragged_images(), 30);
}

TEST(OomRetry, DoesNotChangeDropout) {
  fail_everywhere(dropped_tokens(), 30);
}

TEST(OomRetry, DoesNotChangeSplitWeights) {
  auto config = dropped_tokens();
  config.precision = Precision::kBf16;
  config.weight_copies = WeightCopiesMode::kSplit;
  fail_everywhere(config, 12);
  fail_everywhere(config, 4, {3});
}

TEST(OomRetry, DoesNotChangeOtherOptimizers) {
  for (const char* name : {"sgd", "adafactor", "adam8bit"}) {
    auto config = dropped_tokens();
    config.model_options.width = 32;  // large enough to be quantized
    config.optimizer.name = name;
    config.optimizer.momentum = name == std::string("sgd") ? 0.9 : 0;
    fail_everywhere(config, 10);
  }
}

TEST(OomRetry, DoesNotChangeAWindowResumedFromDisk) {
  auto config = ragged_images();
  config.evaluate = false;
  fail_everywhere(config, 20, {4});  // one micro-batch into the second window
}

/// Allocations of a training with evaluations, saves and a resume fail, one at a time: every
/// fifth, or all with REPRISE_TEST_ALLOCATIONS=all.
TEST(OomRetry, SurvivesAFailureOfAnyAllocation) {
  if (!device().is_cpu()) GTEST_SKIP() << "failures are injected on the CPU";
  auto config = small();
  config.workers = 0;
  config.random_samples = 12;
  config.epochs = 1;
  config.save_every = 1;
  config.evaluate = true;
  config.eval_every = 1;
  const char* which = std::getenv("REPRISE_TEST_ALLOCATIONS");
  const int64_t step = which != nullptr && which == std::string("all") ? 1 : 5;
  int64_t failed = 0;
  for (const std::vector<int>& stops : {std::vector<int>{}, {1}}) {
    const size_t part = stops.size();
    const Ended whole = run(config, stops, nullptr, {.part = part});
    for (int64_t after = 0; after < whole.allocations; after += step) {
      ++failed;
      Warnings warnings;
      expect_same(run(config, stops, &warnings, {.part = part, .after = after}),
                  whole, "allocation " + std::to_string(after));
      EXPECT_EQ(warnings.count("ran out of memory"), 1) << after;
      if (::testing::Test::HasFailure()) return;
    }
  }
  std::printf("%ld allocations failed, one at a time\n",
              static_cast<long>(failed));
}

/// If memory runs out while a state is read, an older state must not be used.
TEST(OomRetry, RepeatsAFailedResume) {
  if (!device().is_cpu()) GTEST_SKIP() << "failures are injected on the CPU";
  auto config = small();
  config.workers = 0;
  config.save_every = 1;
  const Ended whole = run(config);
  for (int64_t after = 0; after < 100; ++after) {
    Warnings warnings;
    expect_same(run(config, {3}, &warnings, {.part = 1, .after = after}), whole,
                "allocation " + std::to_string(after));
    EXPECT_EQ(warnings.count("set aside"), 0) << after;
    EXPECT_EQ(warnings.count("ran out of memory"), 1) << after;
  }
}

TEST(OomRetry, RepeatsAFailedLastUpdateAndSave) {
  if (!device().is_cpu()) GTEST_SKIP() << "failures are injected on the CPU";
  auto config = saved_images();
  config.evaluate = false;
  config.random_samples = 16;
  config.workers = 0;
  const Ended whole = run(config);
  ASSERT_EQ(whole.result.summary.steps, 1);
  // Go backwards from the end of the run, through the save and the last update.
  for (int64_t before_end = 1; before_end < 60; before_end += 3) {
    expect_same(
        run(config, {}, nullptr, {.after = whole.allocations - before_end}),
        whole, std::to_string(before_end) + " before the end");
  }
}

/// Trains with a CUDA out-of-memory error before micro-batch `at`.
Ended run_failing_before(TrainConfig config, int at) {
  const testing::TemporaryDirectory base;
  config.resolve();
  auto directory = RunDirectory::create(base.path() + "/run", to_json(config));
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
  const auto saved =
      detail::newest_state(directory, [](const auto&) { FAIL(); });
  ended.tensors = saved->tensors;
  ended.tensors.emplace_back(
      "scale", torch::scalar_tensor(saved->state.scaler.scale, torch::kDouble));
  ended.metrics = read_text(directory.metrics_path());
  return ended;
}

/// Runs on any device, and with fp16 on CUDA.
TEST(OomRetry, DoesNotChangeResultsIfMicroBatchesFail) {
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

TEST(OomRetry, SavesTheLastCompleteStateWhenRetriesAreExhausted) {
  const testing::TemporaryDirectory base;
  auto config = small();
  config.steps = 4;
  config.epochs = 0;
  config.workers = 0;
  config.resolve();
  auto directory = RunDirectory::create(base.path() + "/run", to_json(config));
  Warnings warnings;
  TrainRun how;
  how.directory = &directory;
  how.listener = &warnings;
  int asked = 0;
  how.stop = [&asked] {
    // A window has two micro-batches, so the third window always fails.
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

  const auto saved =
      detail::newest_state(directory, [](const auto&) { FAIL(); });
  ASSERT_TRUE(saved.has_value());
  EXPECT_EQ(saved->state.step, 2);
  EXPECT_EQ(saved->state.micro, 0);
  how.resume = true;
  how.stop = {};
  EXPECT_EQ(Trainer(make_inputs(config), config).run(how).summary.steps, 4);
  Ended ended;
  ended.tensors =
      detail::newest_state(directory, [](const auto&) { FAIL(); })->tensors;
  ended.metrics = read_text(directory.metrics_path());
  expect_same(ended, run(config), "after giving up");
}

}  // namespace
}  // namespace reprise
