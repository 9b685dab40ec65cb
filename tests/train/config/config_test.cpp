#include "support.h"

#include <reprise/train/config.h>

#include <nlohmann/json.hpp>

namespace reprise {
namespace {

using testing::error_of;

TrainConfig sizes(int64_t batch, int64_t accumulate, int64_t global) {
  TrainConfig config;
  config.batch = batch;
  config.accumulate = accumulate;
  config.global_batch = global;
  config.resolve();
  return config;
}

TEST(Config, TwoSizesDetermineTheThird) {
  const auto expect = [](const TrainConfig& config, int64_t batch,
                         int64_t accumulate) {
    EXPECT_EQ(config.batch, batch);
    EXPECT_EQ(config.accumulate, accumulate);
  };
  expect(sizes(0, 0, 0), 32, 1);
  expect(sizes(4, 0, 0), 4, 1);
  expect(sizes(4, 8, 0), 4, 8);
  expect(sizes(4, 0, 32), 4, 8);
  expect(sizes(0, 8, 32), 4, 8);
  expect(sizes(0, 0, 32), 32, 1);
  expect(sizes(4, 8, 32), 4, 8);
  EXPECT_EQ(sizes(4, 8, 0).global_batch, 32);
  EXPECT_NE(error_of([] {
              sizes(4, 4, 32);
            }).find("32 samples are 8 micro-batches of 4, not --accumulate 4"),
            std::string::npos);
  EXPECT_THROW(sizes(-1, 0, 0), c10::Error);
}

TEST(Config, DeviceAndBudgetDecideWhetherATrainingIsPlanned) {
  const auto resolved = [](const std::string& device, int64_t memory,
                           const std::string& recompute = "") {
    TrainConfig config;
    config.device = device;
    config.memory_limit = memory;
    config.recompute = recompute;
    config.resolve();
    EXPECT_EQ(config.plans_if_long(), config.recompute == "auto");
    TrainConfig again = config;
    again.resolve();
    EXPECT_EQ(again.recompute, config.recompute);
    return config.recompute;
  };
  EXPECT_EQ(resolved("cpu", 0), "none");
  EXPECT_EQ(resolved("cuda", 0), "auto");
  EXPECT_EQ(resolved("cuda:1", 0, "auto"), "auto");
  EXPECT_EQ(resolved("cpu", 0, "auto"), "none");
  EXPECT_EQ(resolved("cpu", 1 << 30), "optimal");
  EXPECT_EQ(resolved("cuda", 1 << 30, "auto"), "optimal");
  EXPECT_EQ(resolved("cuda", 0, "all"), "all");
}

TEST(Config, AllowsASmallerLastMicroBatch) {
  const auto expect = [](const TrainConfig& config, int64_t batch,
                         int64_t accumulate) {
    EXPECT_EQ(config.batch, batch);
    EXPECT_EQ(config.accumulate, accumulate);
    EXPECT_EQ(config.global_batch, 10);
    TrainConfig again = config;
    again.resolve();
    EXPECT_EQ(to_json(again), to_json(config));
  };
  expect(sizes(3, 0, 10), 3, 4);
  expect(sizes(0, 4, 10), 3, 4);
  expect(sizes(3, 4, 10), 3, 4);
  expect(sizes(6, 0, 10), 6, 2);
  // Six micro-batches of two samples would leave the sixth one empty.
  EXPECT_NE(error_of([] {
              sizes(0, 6, 10);
            }).find("10 samples are 5 micro-batches of 2, not --accumulate 6"),
            std::string::npos);
  EXPECT_NE(error_of([] { sizes(11, 0, 10); }).find("expected at most the 10"),
            std::string::npos);
}

TEST(Config, AllowsExecutionOptionsToChangeOnResume) {
  TrainConfig config;
  config.resolve();
  EXPECT_EQ(config.graph, GraphMode::kAuto);
  EXPECT_EQ(config.weight_copies, WeightCopiesMode::kAuto);
  EXPECT_EQ(config.host_memory, "auto");
  TrainConfig other = config;
  other.graph = GraphMode::kOff;
  other.weight_copies = WeightCopiesMode::kEach;
  other.host_memory = "off";
  other.state = StatePlace::kDevice;
  EXPECT_EQ(conflict(config, other), "");
  EXPECT_EQ(config_from_json(to_json(other)).state, StatePlace::kDevice);
  EXPECT_EQ(config_from_json(to_json(other)).graph, GraphMode::kOff);
}

TEST(Config, MemoryLimitImpliesOptimalUnlessAStrategyIsGiven) {
  TrainConfig config;
  config.resolve();
  EXPECT_EQ(config.recompute, "none");
  config = {};
  config.memory_limit = 1 << 20;
  config.resolve();
  EXPECT_EQ(config.recompute, "optimal");
  EXPECT_EQ(config.batch, 32);
  EXPECT_FALSE(config.plans_micro_batch());
  config.recompute = "sqrt";
  config.resolve();
  EXPECT_EQ(config.recompute, "sqrt");
  config = {};
  config.recompute = "optimal";
  EXPECT_NE(error_of([&] { config.resolve(); }).find("needs --memory"),
            std::string::npos);
}

TEST(Config, LeavesTheMicroBatchToThePlanner) {
  TrainConfig config;
  config.memory_limit = 1 << 20;
  config.global_batch = 10;
  config.resolve();
  EXPECT_TRUE(config.plans_micro_batch());
  EXPECT_EQ(config.batch, 0);
  EXPECT_EQ(config.accumulate, 0);
  config.resolve();
  EXPECT_TRUE(config.plans_micro_batch());
  config.batch = 3;
  config.resolve();
  EXPECT_EQ(config.accumulate, 4);
}

TEST(Config, ErrorsNameInvalidValues) {
  const auto error = [](auto change) {
    TrainConfig config;
    change(config);
    return error_of([&] { config.resolve(); });
  };
  EXPECT_NE(
      error([](auto& c) { c.optimizer.name = "SGD"; }).find("--optimizer"),
      std::string::npos);
  EXPECT_NE(error([](auto& c) {
              c.quantize_embeddings = true;
            }).find("[--quantize-embeddings] needs --optimizer adam8bit"),
            std::string::npos);
  EXPECT_NE(error([](auto& c) {
              c.scale_lr = LrScaling::kLinear;
            }).find("--base-batch"),
            std::string::npos);
  EXPECT_NE(error([](auto& c) {
              c.steps = 1;
              c.epochs = 1;
            }).find("either --steps or --epochs"),
            std::string::npos);
  EXPECT_FALSE(error([](auto& c) { c.recompute = "every:x"; }).empty());
}

TEST(Config, RejectsOptionsWithoutEffect) {
  const auto error = [](auto change) {
    TrainConfig config;
    change(config);
    return error_of([&] { config.resolve(); });
  };
  const auto expect = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(error([](auto& c) { c.optimizer.momentum = 0.9; }),
         "[--momentum] needs --optimizer sgd, got adamw");
  expect(error([](auto& c) { c.optimizer.nesterov = true; }),
         "[--nesterov] needs --optimizer sgd, got adamw");
  expect(error([](auto& c) {
           c.optimizer.name = "sgd";
           c.optimizer.nesterov = true;
         }),
         "[--nesterov] needs --momentum above 0");
  expect(error([](auto& c) {
           c.optimizer.name = "sgd";
           c.optimizer.beta1 = 0.8;
         }),
         "[--beta1] needs --optimizer adam");
  expect(error([](auto& c) { c.base_batch = 32; }),
         "[--base-batch] needs --scale-lr");
  expect(error([](auto& c) { c.rate.lowest = 1e-4; }),
         "[--lr-lowest] needs --lr-schedule cosine");
  expect(error([](auto& c) {
           c.rate.schedule = LrScheduleKind::kCosine;
           c.rate.lowest = 0.5;
         }),
         "[--lr-lowest] expected at most the --lr of 0.001, got 0.5");
  expect(error([](auto& c) {
           c.rate.schedule = LrScheduleKind::kCosine;
           c.rate.warmup_steps = 10;
           c.steps = 10;
         }),
         "[--warmup] expected fewer than the --steps of 10");
}

/// Values that mean "not given" are allowed; all others must be in range.
TEST(Config, RejectsValuesOutOfRange) {
  const auto resolve_with = [](const char* field, const auto& value) {
    auto fields = nlohmann::json::parse(to_json(TrainConfig{}));
    fields[field] = value;
    config_from_json(fields.dump()).resolve();
  };
  const auto expect = [&](const char* field, const auto& value,
                          const char* part) {
    const std::string text = error_of([&] { resolve_with(field, value); });
    EXPECT_NE(text.find(part), std::string::npos) << field << ": " << text;
  };
  EXPECT_NO_THROW(resolve_with("batch", 0));
  EXPECT_NO_THROW(resolve_with("depth", 0));
  EXPECT_NO_THROW(resolve_with("dropout", -1.0));
  EXPECT_NO_THROW(resolve_with("shard", "none"));
  expect("batch", -1, "[--batch] expected a whole number from 1 to");
  expect("depth", 100'000'000, "[--depth] expected a whole number from 1 to");
  expect("image-size", -3, "[--image-size] expected");
  expect("threads", 100'000, "[--threads] expected a whole number from 0 to");
  expect("keep", 0, "[--keep] expected a whole number from 1 to 1000, got '0'");
  expect("ranks", 0, "[--ranks] expected a whole number from 1 to");
  expect("dropout", 1.0, "[--dropout] expected a number from 0 to below 1");
  expect("lr", -0.1, "[--lr] expected a number from 0 to 1000, got '-0.1'");
  expect("loss-scale", 0, "[--loss-scale] expected a number above 0");
  expect("bucket", 25, "[--bucket] expected at least 1.00 KiB, got '25'");
  expect("model", "gtp2", "[--model] unknown name 'gtp2'; did you mean gpt2?");
  expect("device", "cpu:1", "[--device] expected cpu, cuda or cuda:N");
  expect("shard", "optimiser",
         "[--shard] expected one of none, optimizer, gradients, parameters, "
         "got 'optimiser'; did "
         "you mean optimizer?");
  expect("recompute", "sqr", "did you mean sqrt?");
  expect("precision", "fp8",
         "[--precision] expected one of fp32, bf16, fp16, got 'fp8'");
  expect("graph", "yes", "[--graph] expected one of auto, on, off, got 'yes'");
  expect("host-memory", "some",
         "[--host-memory] expected auto, off or a size such as 8GiB, got "
         "'some'");
}

TEST(Config, RejectsInvalidJson) {
  EXPECT_NE(error_of([] { config_from_json("{\"model\": "); }).find("JSON"),
            std::string::npos);
  auto fields = nlohmann::json::parse(to_json(TrainConfig{}));
  fields["depth"] = "four";
  EXPECT_NE(error_of([&] {
              config_from_json(fields.dump());
            }).find("with another type of 'depth'"),
            std::string::npos);
  fields.erase("depth");
  EXPECT_NE(error_of([&] {
              config_from_json(fields.dump());
            }).find("without 'depth'"),
            std::string::npos);
}

TEST(Config, ReadsJsonOfOtherVersions) {
  TrainConfig config;
  config.model = "gpt2";
  config.model_options.depth = 3;
  config.optimizer.name = "adam8bit";
  config.optimizer.beta1 = 0.8;
  config.quantize_embeddings = true;
  config.rate.base = 0.1;
  config.recompute = "revolve:3";
  config.seed = 18446744073709551615u;
  config.resolve();
  EXPECT_EQ(to_json(config_from_json(to_json(config))), to_json(config));
  EXPECT_THROW(config_from_json("{}"), c10::Error);
  // A field that is missing in an older run gets its default.
  std::string older = to_json(config);
  const std::string field = "\"fp32-products\"";
  const auto at = older.find(field);
  ASSERT_NE(at, std::string::npos);
  older.replace(at, field.size(), "\"another\"");
  EXPECT_EQ(to_json(config_from_json(older)), to_json(config));
  EXPECT_THROW(config_from_json("no"), c10::Error);
}

TEST(Config, ConflictNamesTheFirstRelevantDifference) {
  TrainConfig saved;
  TrainConfig now = saved;
  now.steps = 100;
  now.workers = 1;
  now.recompute = "sqrt";
  EXPECT_EQ(conflict(saved, now), "");
  now.model = "gpt2";
  EXPECT_EQ(conflict(saved, now), "model was \"cnn-basic\", now \"gpt2\"");
}

TEST(Config, SamplesOfAnUpdateDoNotOverflow) {
  TrainConfig config;
  config.model = "mlp";
  config.batch = config.accumulate = 1 << 24;
  config.ranks = 1 << 12;
  EXPECT_NE(testing::error_of([&] {
              config.resolve();
            }).find("[--batch] expected at most 1000000000 samples"),
            std::string::npos);
}

TEST(Config, TextsAreUtf8) {
  TrainConfig config;
  config.model = "mlp";
  config.data = "\xff.bin";
  EXPECT_NE(testing::error_of([&] {
              config.resolve();
            }).find("[--data] expected text in UTF-8"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
