// Trainings that update parameters in the backward. The truth are trainings that do so after
// it, by Optimizer::step().
#include "train/step/backward_update.h"

#include "train/step/failing_updates.h"
#include "train/step/graph_runs.h"

#include <reprise/recompute/strategy.h>
#include <reprise/train/planning.h>

#include <torch/optim/sgd.h>

#include <filesystem>
#include <optional>

namespace reprise {
namespace {

using detail::RecordedInstead;
using testing::device;
using testing::Ended;
using testing::error_of;
using testing::expect_same;
using testing::fail_all_over;
using testing::heavy;
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

TrainConfig with(TrainConfig config, UpdateMode update) {
  config.update = update;
  return config;
}

Ended run_with(const TrainConfig& config, UpdateMode update,
               const std::vector<int>& stops = {},
               TrainListener* listener = nullptr) {
  return run(with(config, update), stops, listener);
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

TEST(BackwardUpdate, ContinuesIfMemoryRunsOut) {
  if (device().is_cuda()) GTEST_SKIP() << "failures are injected on the CPU";
  for (const auto& [what, config] : trainings()) {
    if (config.model == "cnn-basic" || config.lora.rank > 0) continue;
    const TrainConfig large = heavy(config);
    const auto outcome =
        fail_all_over(with(large, UpdateMode::kBackward),
                      run_with(large, UpdateMode::kAfter), what, 24);
    EXPECT_GT(outcome.continued, 0) << what;
    // Copies of the tied weight are added to in place.
    const bool copies = large.weight_copies == WeightCopiesMode::kOn ||
                        large.precision == Precision::kBf16;
    if (!copies) {
      EXPECT_EQ(outcome.ended, 0) << what;
    }
  }
}

/// The gradients between its stages are larger than a share of those of the parameters.
TEST(BackwardUpdate, EndsWithoutLossIfGradientsAreTooLargeToBeHeld) {
  if (device().is_cuda()) GTEST_SKIP() << "failures are injected on the CPU";
  const TrainConfig config = whole(testing::images());
  const auto outcome =
      fail_all_over(with(config, UpdateMode::kBackward),
                    run_with(config, UpdateMode::kAfter), "cnn-basic", 40);
  EXPECT_GT(outcome.ended, 0);
}

/// Adds a stage whose backward runs out of memory while `fails` is true.
void add_failing_stage(Model& model, const std::shared_ptr<bool>& fails) {
  std::vector<Stage> stages = {model.chain[0]};
  stages.push_back(make_stage("failing", [fails](const Tensors& inputs) {
    Tensors outputs = inputs;
    outputs[0] = inputs[0].clone();
    if (!outputs[0].requires_grad()) return outputs;
    outputs[0].register_hook([fails](const torch::Tensor& gradient) {
      if (*fails) C10_THROW_ERROR(OutOfMemoryError, "out of memory");
      return gradient;
    });
    return outputs;
  }));
  for (int i = 1; i < model.chain.size(); ++i) stages.push_back(model.chain[i]);
  model.chain = Chain(std::move(stages));
}

TEST(BackwardUpdate, LosesNoSavedStateIfNothingHelps) {
  auto config = heavy(whole(small()));
  config.save_every = 1;
  config.update = UpdateMode::kBackward;
  config.resolve();
  const TemporaryDirectory base;
  const auto fails = std::make_shared<bool>(false);
  const auto train = [&](const std::string& name, int64_t failing_update) {
    const std::string path = base.path() + "/" + name;
    struct Listener : Warnings {
      void updated(int64_t step) override { *fails = step + 1 == at; }
      std::shared_ptr<bool> fails;
      int64_t at = 0;
    } listener;
    listener.fails = fails;
    listener.at = failing_update;
    TrainInputs inputs = make_inputs(config);
    add_failing_stage(inputs.model, fails);
    Trainer trainer(std::move(inputs), config);
    TrainRun how;
    how.listener = &listener;
    how.resume = std::filesystem::exists(path);
    auto directory = how.resume ? RunDirectory::open(path)
                                : RunDirectory::create(path, to_json(config));
    how.directory = &directory;
    trainer.run(how);
    return detail::newest_state(directory, [](const auto&) { FAIL(); })
        ->tensors;
  };
  const NamedTensors plain = train("plain", 0);
  const std::string error = error_of([&] { train("failing", 3); });
  EXPECT_NE(error.find("resume from the last saved state"), std::string::npos)
      << error;
  *fails = false;
  const NamedTensors resumed = train("failing", 0);
  ASSERT_EQ(resumed.size(), plain.size());
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(same(resumed[i].second, plain[i].second)) << plain[i].first;
  }
}

}  // namespace
}  // namespace reprise
