// Trainings that update parameters in the backward. The truth are trainings that do so after
// it, by Optimizer::step().
#include "train/step/backward_update.h"

#include "train/step/graph_runs.h"

#include <reprise/recompute/strategy.h>
#include <reprise/train/planning.h>

#include <torch/optim/sgd.h>

#include <optional>

namespace reprise {
namespace {

using detail::RecordedInstead;
using testing::device;
using testing::Ended;
using testing::error_of;
using testing::expect_same;
using testing::Failing;
using testing::repeated;
using testing::run;
using testing::same;
using testing::small;
using testing::TemporaryDirectory;
using testing::Warnings;

/// A training with one micro-batch per window; the last window of an epoch is smaller.
TrainConfig whole(TrainConfig config) {
  config.batch = 8;
  config.accumulate = 1;
  config.global_batch = 0;
  config.clip = 0;
  config.rate.schedule = LrScheduleKind::kCosine;
  config.rate.warmup_steps = 2;
  config.optimizer.weight_decay = 0.1;
  return config;
}

std::vector<std::pair<std::string, TrainConfig>> trainings() {
  std::vector<std::pair<std::string, TrainConfig>> list;
  list.emplace_back("mlp", whole(small()));
  list.emplace_back("cnn-basic with BatchNorm", whole(testing::images()));
  list.emplace_back("gpt2 with a tied weight", whole(testing::tokens()));
  auto adapted = whole(testing::tokens());
  adapted.lora.rank = 2;
  list.emplace_back("gpt2 with frozen weights", adapted);
  auto half = whole(testing::tokens());
  half.precision = Precision::kBf16;
  half.weight_copies = WeightCopiesMode::kOn;
  list.emplace_back("gpt2 with weight copies", half);
  half.weight_copies = WeightCopiesMode::kEach;
  list.emplace_back("gpt2 with conversions", half);
  half.weight_copies = WeightCopiesMode::kSplit;
  list.emplace_back("gpt2 with split weights", half);
  auto full = whole(testing::tokens());
  full.weight_copies = WeightCopiesMode::kOn;
  list.emplace_back("gpt2 with direct gradients", full);
  return list;
}

Ended run_with(TrainConfig config, UpdateMode update,
               const std::vector<int>& stops = {},
               TrainListener* listener = nullptr) {
  config.update = update;
  return run(config, stops, listener);
}

void expect_same_updates(const TrainConfig& config, const std::string& what) {
  expect_same(run_with(config, UpdateMode::kBackward),
              run_with(config, UpdateMode::kAfter), what);
}

TEST(BackwardUpdate, DoesNotChangeResults) {
  for (const auto& [what, config] : trainings()) {
    expect_same_updates(config, what);
  }
}

TEST(BackwardUpdate, DoesNotChangeResultsForAnyStrategy) {
  auto half = whole(testing::tokens());
  half.precision = Precision::kBf16;
  half.weight_copies = WeightCopiesMode::kOn;
  for (const char* strategy : {"all", "every:2", "revolve:2"}) {
    for (auto config :
         {whole(testing::images()), whole(testing::tokens()), half}) {
      config.recompute = strategy;
      expect_same_updates(config, config.model + ", " + strategy);
    }
  }
}

TEST(BackwardUpdate, DoesNotChangeResultsForAnyOptimizer) {
  for (const std::string& name : optimizer_names()) {
    for (auto config : {whole(testing::tokens()), whole(testing::images())}) {
      config.optimizer.name = name;
      expect_same_updates(config, name);
      if (name != "sgd") continue;
      config.optimizer.momentum = 0.9;
      expect_same_updates(config, "sgd with momentum");
      config.optimizer.nesterov = true;
      expect_same_updates(config, "sgd with Nesterov momentum");
    }
  }
  // Large enough for quantized moments.
  auto config = whole(small());
  config.model_options.width = 80;
  config.optimizer.name = "adamw8bit";
  expect_same_updates(config, "adamw8bit");
}

TEST(BackwardUpdate, DoesNotChangeResultsOfGroups) {
  auto config = whole(testing::tokens());
  config.optimizer.groups = {
      {[](const std::string&, const torch::Tensor& p) { return p.dim() < 2; },
       /*lr_factor=*/1, /*weight_decay=*/0.0},
      {[](const std::string& name, const torch::Tensor&) {
         return name.find("1") != std::string::npos;
       },
       /*lr_factor=*/0.3}};
  config.resolve();
  const auto trained = [&](UpdateMode update) {
    config.update = update;
    Trainer trainer(make_inputs(config), config);
    trainer.run();
    std::vector<torch::Tensor> values;
    for (const auto& p : trainer.model().root->parameters()) {
      values.push_back(p.detach().clone());
    }
    return values;
  };
  const auto expected = trained(UpdateMode::kAfter);
  const auto got = trained(UpdateMode::kBackward);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(same(got[i], expected[i])) << i;
  }
}

TEST(BackwardUpdate, ContinuesResumedRuns) {
  for (const auto& config :
       {whole(small()), whole(testing::images()), whole(testing::tokens())}) {
    const Ended plain = run_with(config, UpdateMode::kAfter);
    for (const int stop : {0, 1, 4}) {
      expect_same(run_with(config, UpdateMode::kBackward, {stop}), plain,
                  config.model + " stopped after " + std::to_string(stop));
    }
    expect_same(run_with(config, UpdateMode::kBackward, {2, 1, 1}), plain,
                config.model + ", three stops");
  }
}

/// With CUDA graphs on a GPU, and with a fake that repeats the step on the CPU.
TEST(BackwardUpdate, IsPartOfARecordedStep) {
  std::optional<RecordedInstead> instead;
  if (device().is_cpu()) instead.emplace(repeated());
  for (auto [what, config] : trainings()) {
    config.epochs = 4;
    const Ended plain = run_with(config, UpdateMode::kAfter);
    config.graph = GraphMode::kAuto;
    const Ended recorded = run_with(config, UpdateMode::kBackward);
    EXPECT_EQ(recorded.result.summary.graph, "on") << what;
    EXPECT_GT(recorded.result.summary.graph_replays, 0) << what;
    expect_same(recorded, plain, what);
  }
  if (device().is_cpu()) return;
  auto config = whole(testing::tokens());
  config.graph = GraphMode::kAuto;
  config.optimizer.name = "adafactor";
  const Ended plain = run_with(config, UpdateMode::kAfter);
  const Ended without = run_with(config, UpdateMode::kBackward);
  EXPECT_EQ(without.result.summary.graph.rfind("off: with --update", 0), 0u);
  expect_same(without, plain, "adafactor");
}

TEST(BackwardUpdate, ContinuesWithoutAGraphAfterAFailedCapture) {
  if (device().is_cuda()) GTEST_SKIP() << "with real graphs there";
  auto config = whole(testing::tokens());
  config.epochs = 4;
  const Ended plain = run_with(config, UpdateMode::kAfter);
  config.graph = GraphMode::kAuto;
  int fails = 1;
  const RecordedInstead instead(repeated(&fails));
  Warnings warnings;
  expect_same(run_with(config, UpdateMode::kBackward, {}, &warnings), plain,
              "after a failed capture");
  EXPECT_EQ(warnings.count("cannot be captured"), 1);
}

/// Equal blocks whose parameters are much larger than everything else.
TrainConfig heavy() {
  auto config = whole(small());
  config.model_options.depth = 12;
  config.model_options.width = 256;
  config.random_samples = 6;
  config.batch = 2;
  config.workers = 0;
  config.optimizer = {.name = "sgd"};
  config.rate = {};
  return config;
}

TEST(BackwardUpdate, HoldsTheGradientsOfOneStageAtATime) {
  const auto after = run_with(heavy(), UpdateMode::kAfter).result.summary;
  const auto back = run_with(heavy(), UpdateMode::kBackward).result.summary;
  const auto gradients = [](const TrainSummary& s) {
    return s.memory[Category::kGradients];
  };
  const int64_t all = 4 * after.parameters;
  EXPECT_GE(gradients(after), all * 3 / 4);  // at the peak, in the first layer
  EXPECT_LE(gradients(back), all / 4);
  // 12 blocks of equal size and a first layer that is three times as large.
  EXPECT_LE(back.peak_bytes, after.peak_bytes - all * 2 / 3);
}

TEST(BackwardUpdate, IsRefusedWhenGradientsAreNeededTogether) {
  const auto refusal = [](const std::function<void(TrainConfig&)>& change) {
    auto config = whole(small());
    config.update = UpdateMode::kBackward;
    change(config);
    return error_of([&] { config.resolve(); });
  };
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_EQ(text.rfind("[--update] backward", 0), 0u) << text;
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(refusal([](TrainConfig& c) { c.accumulate = 2; }),
         "one micro-batch per update, got 2");
  expect(refusal([](TrainConfig& c) { c.clip = 1; }), "--clip");
  expect(refusal([](TrainConfig& c) { c.precision = Precision::kFp16; }),
         "fp16");
  expect(refusal([](TrainConfig& c) { c.ranks = 2; }), "ranks");

  auto config = whole(small());
  config.update = UpdateMode::kBackward;
  config.resolve();
  TrainInputs inputs = make_inputs(config);
  inputs.optimizer = [](const NamedTensors& parameters) {
    std::vector<torch::Tensor> list;
    for (const auto& item : parameters) list.push_back(item.second);
    return wrap_optimizer(std::make_unique<torch::optim::SGD>(list, 0.1),
                          parameters);
  };
  expect(error_of([&] { Trainer(inputs, config); }), "single parameters");

  struct : TrainListener {
  } needy;
  Trainer trainer(make_inputs(config), config);
  TrainRun how;
  how.listener = &needy;
  expect(error_of([&] { trainer.run(how); }),
         "the listener needs complete gradients");
}

TEST(BackwardUpdate, LosesNoSavedStateWhenMemoryRunsOut) {
  if (device().is_cuda()) GTEST_SKIP() << "failures are injected on the CPU";
  auto config = whole(testing::images());
  config.workers = 0;
  config.save_every = 1;
  const Ended plain = run_with(config, UpdateMode::kAfter);
  config.update = UpdateMode::kBackward;
  const int64_t all = run(config, {}, nullptr, {0}).allocations;
  ASSERT_GT(all, 100);
  config.resolve();
  int ended = 0, repeated_windows = 0;
  for (int i = 1; i < 40; ++i) {
    const TemporaryDirectory base;
    const std::string path = base.path() + "/run";
    const auto train = [&](RunDirectory directory) {
      Trainer trainer(make_inputs(config), config);
      TrainRun how;
      how.directory = &directory;
      how.resume =
          detail::newest_state(directory, [](const auto&) {}).has_value();
      std::optional<AllocationFailure> failure;
      if (!how.resume) failure.emplace(all * i / 40);
      trainer.run(how);
    };
    std::string error;
    try {
      train(RunDirectory::create(path, to_json(config)));
      ++repeated_windows;
    } catch (const c10::Error& caught) {
      error = caught.what_without_backtrace();
    }
    if (!error.empty()) {
      EXPECT_NE(error.find("saved state"), std::string::npos) << error;
      auto directory = RunDirectory::open(path);
      // Without a saved state there is nothing to resume.
      if (!detail::newest_state(directory, [](const auto&) {})) continue;
      ++ended;
      train(std::move(directory));
    }
    const auto state = detail::newest_state(RunDirectory::open(path),
                                            [](const auto&) { FAIL(); });
    ASSERT_TRUE(state.has_value());
    ASSERT_EQ(state->tensors.size(), plain.tensors.size());
    for (size_t t = 0; t < plain.tensors.size(); ++t) {
      EXPECT_TRUE(same(state->tensors[t].second, plain.tensors[t].second))
          << i << " " << plain.tensors[t].first;
    }
  }
  EXPECT_GT(ended, 0);
  EXPECT_GT(repeated_windows, 0);
}

}  // namespace
}  // namespace reprise
