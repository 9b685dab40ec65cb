#include "base/file.h"
#include "train/runs.h"
#include "train/store/metrics.h"

#include <reprise/memory/meter.h>
#include <reprise/ops/weight_copies.h>

#include <nlohmann/json.hpp>

#include <map>
#include <sstream>

namespace reprise {
namespace {

using testing::device;
using testing::Ended;
using testing::error_of;
using testing::expect_same;
using testing::relative_error;
using testing::run;
using testing::same;
using testing::small;

/// Checks that parameters are readable after each update.
struct ReadsWeights : TrainListener {
  void gradients_ready(int64_t, const NamedTensors& all) override {
    parameters = all;
  }
  void updated(int64_t) override {
    for (const auto& [name, parameter] : parameters) {
      EXPECT_FALSE(WeightCopies::is_split(parameter)) << name;
    }
    ++updates;
  }
  NamedTensors parameters;
  int updates = 0;
};

TEST(Trainer, RecomputationDoesNotChangeResults) {
  auto config = small("cnn-basic");
  const Ended plain = run(config);
  for (const char* strategy : {"sqrt", "all", "revolve:2"}) {
    config.recompute = strategy;
    expect_same(run(config), plain, strategy);
  }
}

TEST(Trainer, ResumeDoesNotChangeResultsAtAnyStop) {
  for (const char* optimizer : {"adamw", "sgd", "adafactor", "adamw8bit"}) {
    auto config = small();
    config.optimizer.name = optimizer;
    config.optimizer.momentum = optimizer == std::string("sgd") ? 0.9 : 0;
    config.clip = 0.5;
    config.rate.schedule = LrScheduleKind::kCosine;
    config.rate.warmup_steps = 2;
    const Ended whole = run(config);
    // Stop after each of the 12 micro-batches in 6 windows, and several times.
    for (int stop = 0; stop < 12; ++stop) {
      expect_same(
          run(config, {stop}), whole,
          std::string(optimizer) + ", stopped after " + std::to_string(stop));
    }
    expect_same(run(config, {1, 0, 4, 3}), whole, "four stops");
  }
}

TEST(Trainer, ResumeDoesNotChangeResultsWithASmallerLastMicroBatch) {
  auto config = small();
  config.batch = 3;
  config.accumulate = 0;
  config.global_batch = 8;  // 3, 3, 2; the last window of an epoch has 3, 3
  const Ended whole = run(config);
  EXPECT_EQ(whole.result.summary.steps, 6);
  EXPECT_EQ(whole.result.summary.accumulate, 3);
  for (int stop = 0; stop < 16; ++stop) {
    expect_same(run(config, {stop}), whole,
                "stopped after " + std::to_string(stop));
  }
  expect_same(run(config, {1, 0, 4, 3}), whole, "four stops");
}

TEST(Trainer, AccumulationEqualsTheFullBatch) {
  auto config = small();
  config.model_options.dropout = 0;
  config.optimizer.name = "sgd";
  config.rate.base = 0.1;
  config.accumulate = 0;
  config.global_batch = 8;
  config.batch = 8;
  const Ended full = run(config);
  for (const int64_t batch : {1, 2, 3, 4, 5, 7}) {
    config.batch = batch;
    const Ended parts = run(config);
    for (size_t i = 0; i < full.tensors.size(); ++i) {
      if (!full.tensors[i].first.starts_with("parameter.")) continue;
      EXPECT_LT(relative_error(full.tensors[i].second, parts.tensors[i].second),
                1e-5)
          << batch << " " << full.tensors[i].first;
    }
  }
}

TEST(Trainer, MetricsHaveOneLinePerUpdate) {
  const Ended ended = run(small());
  std::istringstream lines(ended.metrics);
  std::string line;
  int step = 0;
  int64_t samples = 0;
  while (std::getline(lines, line)) {
    const auto json = nlohmann::json::parse(line);
    EXPECT_EQ(json.at("step"), ++step);
    EXPECT_GT(json.at("loss").get<double>(), 0);
    samples += json.at("samples").get<int64_t>();
  }
  EXPECT_EQ(step, 6);  // two epochs of 8, 8 and 6 samples
  EXPECT_EQ(samples, 44);
  EXPECT_EQ(ended.result.summary.steps, 6);
}

TEST(Trainer, PendingMetricsHaveAFixedSize) {
  using detail::Metrics;
  const testing::TemporaryDirectory base;
  const auto directory =
      RunDirectory::create(base.path() + "/run", to_json(small()));
  Metrics metrics(&directory, 0, "", nullptr, device());
  const auto scalar = [](double value) {
    return torch::full({}, value, testing::on_device(torch::kFloat));
  };
  constexpr int64_t kUpdates = Metrics::kMostPending + 44;
  const int64_t before = live_bytes(device());
  for (int64_t step = 1; step <= kUpdates; ++step) {
    if (metrics.full()) metrics.flush();
    metrics.add(step, scalar(0.5), step % 2 == 0 ? scalar(2) : torch::Tensor(),
                0.1, 3);
    EXPECT_EQ(live_bytes(device()), before);
  }
  metrics.flush();
  metrics.synced_bytes();
  std::istringstream lines(read_text(directory.metrics_path()));
  std::string line;
  int64_t step = 0;
  while (std::getline(lines, line)) {
    const auto json = nlohmann::json::parse(line);
    EXPECT_EQ(json.at("step"), ++step);
    EXPECT_EQ(json.at("loss"), 0.5);
    ASSERT_EQ(json.contains("norm"), step % 2 == 0);
    EXPECT_EQ(json.value("norm", 2.0), 2.0);
  }
  EXPECT_EQ(step, kUpdates);
}

TEST(Trainer, SummaryShowsThePeakByCategory) {
  auto config = small();
  config.optimizer.name = "adam";
  const auto s = run(config).result.summary;
  EXPECT_GT(s.peak_bytes, 0);
  EXPECT_GT(s.kept_bytes, 0);
  EXPECT_FALSE(s.peak_phase.empty());
  int64_t sum = 0;
  for (const int64_t bytes : s.memory.bytes) sum += bytes;
  EXPECT_EQ(sum, s.window_peak_bytes);
  EXPECT_LE(s.window_peak_bytes, s.peak_bytes);
  const int64_t bytes = s.parameters * 4;
  EXPECT_NEAR(double(s.memory[Category::kParameters]), double(bytes),
              device().is_cpu() ? 0 : 0.05 * double(bytes));
  EXPECT_GE(s.memory[Category::kOptimizer], 2 * bytes);
}

TEST(Trainer, QuantizesEmbeddingsOnRequestOnly) {
  auto config = small("gpt2");
  config.model_options.depth = 1;
  config.model_options.width = 64;
  config.model_options.heads = 2;
  config.model_options.vocab = 100;
  config.model_options.seq = 8;
  config.optimizer.name = "adamw8bit";
  for (const bool quantized : {false, true}) {
    config.quantize_embeddings = quantized;
    std::map<std::string, torch::ScalarType> types;
    for (const auto& [name, tensor] : run(config).tensors) {
      types[name] = tensor.scalar_type();
    }
    EXPECT_EQ(types.at("optimizer.exp_avg.transformer.wte.weight"),
              quantized ? torch::kByte : torch::kFloat);
    EXPECT_EQ(types.at("optimizer.exp_avg.transformer.h.0.mlp.c_fc.weight"),
              torch::kByte);
  }
}

TEST(Trainer, EvaluationDoesNotChangeResults) {
  auto config = small("cnn-basic");
  const Ended plain = run(config);
  config.evaluate = true;
  config.eval_every = 1;
  const Ended evaluated = run(config);
  for (size_t i = 0; i < plain.tensors.size(); ++i) {
    EXPECT_TRUE(same(evaluated.tensors[i].second, plain.tensors[i].second))
        << plain.tensors[i].first;
  }
  ASSERT_TRUE(evaluated.result.summary.eval_metrics.contains("accuracy"));
  EXPECT_LE(evaluated.result.summary.eval_metrics.at("accuracy"), 1);
}

TEST(Trainer, RejectsAnInvalidConfigurationBeforeWriting) {
  const auto refused = [](auto change) {
    auto config = small();
    change(config);
    return error_of([&] {
      config.resolve();
      Trainer(make_inputs(config), config);
    });
  };
  EXPECT_NE(refused([](auto& c) { c.model = "gpt3"; }).find("gpt2"),
            std::string::npos);
  EXPECT_NE(
      refused([](auto& c) { c.data = "/nowhere/images"; }).find("/nowhere"),
      std::string::npos);
  EXPECT_FALSE(refused([](auto& c) { c.recompute = "every:99"; }).empty());
  if (device().is_cpu()) {
    EXPECT_NE(
        refused([](auto& c) { c.precision = Precision::kFp16; }).find("CUDA"),
        std::string::npos);
  }
}

TEST(Trainer, Fp16OverflowSkipsTheUpdate) {
  if (!device().is_cuda()) GTEST_SKIP() << "fp16 needs a CUDA device";
  auto config = small();
  config.precision = Precision::kFp16;
  config.loss_scale = 1e12;  // the first updates must overflow
  config.epochs = 20;
  testing::Warnings warnings;
  const Ended ended = run(config, {}, &warnings);
  EXPECT_GT(ended.result.summary.skipped, 0);
  EXPECT_LT(ended.result.summary.skipped, ended.result.summary.steps);
  ASSERT_FALSE(warnings.list.empty());
  EXPECT_NE(warnings.list[0].find("overflowed"), std::string::npos);
}

TEST(Trainer, SteadyTrainingBeginsAfterWarmUp) {
  struct Heard : TrainListener {
    void training(bool active) override { list += active ? '+' : '-'; }
    void evaluated(const Evaluation&) override { list += 'e'; }
    std::string list;
  };
  auto config = small();
  config.epochs = 0;
  const auto heard = [&](int64_t steps, const std::vector<int>& stops) {
    config.steps = steps;
    Heard heard;
    run(config, stops, &heard);
    return heard.list;
  };
  config.evaluate = true;
  config.eval_every = 1;
  EXPECT_EQ(heard(1, {}), "+-e+-");
  EXPECT_EQ(heard(2, {}), "+-e+-e+-");
  EXPECT_EQ(heard(4, {}), "e+-e+-e+-e+-");
  // Stopped in the first window, before steady training began, and resumed.
  EXPECT_EQ(heard(4, {1}), heard(4, {}));
}

TEST(Trainer, Bf16Trains) {
  auto config = small();
  config.precision = Precision::kBf16;
  const Ended plain = run(config);
  ASSERT_TRUE(plain.result.summary.loss.has_value());
  config.recompute = "all";
  expect_same(run(config), plain, "bf16, all");
}

TEST(Trainer, ChannelsLastGivesSimilarResults) {
  auto config = small("cnn-basic");
  config.model_options.image_size = 28;
  // BatchNorm over few values would amplify rounding errors.
  config.model_options.norm = "group";
  config.optimizer.name = "adam";
  const Ended planes = run(config);
  config.layout = ImageLayout::kChannelsLast;
  const Ended last = run(config);
  // Other kernels round differently.
  EXPECT_NEAR(*last.result.summary.loss, *planes.result.summary.loss,
              1e-2 * *planes.result.summary.loss);
  config.recompute = "all";
  expect_same(run(config), last, "all");
  config.recompute = "none";
  expect_same(run(config, {3, 4}), last, "stopped and resumed");
}

TEST(Trainer, WeightCopiesGiveSimilarResults) {
  auto config = small("gpt2");
  config.model_options = {.depth = 2, .width = 64, .vocab = 90, .seq = 16};
  config.precision = Precision::kBf16;
  config.clip = 0.5;
  config.weight_copies = WeightCopiesMode::kOff;
  const Ended without = run(config);
  config.weight_copies = WeightCopiesMode::kOn;
  const Ended with = run(config);
  // Gradients are rounded in fewer places, so results are close but not
  // bit-identical.
  EXPECT_NE(with.metrics, without.metrics);
  EXPECT_NEAR(*with.result.summary.loss, *without.result.summary.loss,
              2e-3 * *without.result.summary.loss);
  for (const char* strategy : {"all", "sqrt"}) {
    config.recompute = strategy;
    expect_same(run(config), with, strategy);
  }
  config.recompute = "none";
  expect_same(run(config, {3, 4}), with, "stopped and resumed");
  config.weight_copies = WeightCopiesMode::kEach;
  expect_same(run(config), with, "a copy for each use");
  config.weight_copies = WeightCopiesMode::kSplit;
  const Ended split = run(config);
  EXPECT_NEAR(*split.result.summary.loss, *with.result.summary.loss,
              2e-3 * *with.result.summary.loss);
  expect_same(run(config, {3, 4}), split, "split weights, stopped");
  config.recompute = "all";
  expect_same(run(config), split, "split weights, recomputed");
  config.recompute = "none";
  ReadsWeights listener;
  expect_same(run(config, {}, &listener), split, "split weights, read");
  EXPECT_GT(listener.updates, 0);
  config.recompute = "none";
  config.weight_copies = WeightCopiesMode::kOn;
  config.precision = Precision::kFp32;
  const Ended straight = run(config);
  config.weight_copies = WeightCopiesMode::kOff;
  const Ended single = run(config);
  EXPECT_NEAR(*straight.result.summary.loss, *single.result.summary.loss,
              1e-4 * *single.result.summary.loss);
}

TEST(Trainer, RefusesTwoAtOnce) {
  struct Nested : TrainListener {
    void updated(int64_t) override {
      TrainConfig config = small();
      config.resolve();
      Trainer other(make_inputs(config), config);
      text = error_of([&] { other.run({}); });
    }
    std::string text;
  } listener;
  TrainConfig config = small();
  config.steps = 1;
  config.epochs = 0;
  config.resolve();
  Trainer trainer(make_inputs(config), config);
  TrainRun how;
  how.listener = &listener;
  trainer.run(how);
  EXPECT_NE(listener.text.find("expected one training at a time"),
            std::string::npos)
      << listener.text;
  trainer.run({});  // and again afterwards
}

}  // namespace
}  // namespace reprise
