#include "ranked_runs.h"

#include <reprise/models/model.h>
#include <reprise/recompute/strategy.h>

namespace reprise::testing {
namespace {

TEST(RankedTraining, MatchesTheLossesOfOneProcess) {
  const Ended alone = child_rank() < 0 ? run(config_of(1)) : Ended{};
  for (const int ranks : {2, 4}) {
    const TemporaryDirectory folder;
    const auto ends = in_ranks(ranks_in(folder.path(), ranks), [&] {
      const auto result = train({.config = config_of(ranks)});
      EXPECT_EQ(result.summary.ranks, ranks);
      EXPECT_EQ(result.summary.steps, 50);
      EXPECT_EQ(result.summary.reduce_windows, 50);
      EXPECT_GT(result.summary.reduce_calls, 50);
      EXPECT_EQ(result.summary.reduce_calls % 50, 0);
      EXPECT_EQ(result.summary.reduce_bytes,
                50 * 4 * result.summary.parameters);
    });
    if (child_rank() >= 0) continue;
    expect_all_well(ends);
    expect_same_losses(alone, ended(folder.path()));
  }
}

TEST(RankedTraining, MatchesTheLossesOfOneProcessForEveryStrategy) {
  const std::vector<std::string> strategies = {
      "none", "all", "sqrt", "every:2", "checkpoints:1", "revolve:2"};
  const auto config_with = [](const std::string& strategy, int64_t ranks) {
    TrainConfig config = tied_config(ranks);
    config.recompute = strategy;
    return config;
  };
  const Ended alone = child_rank() < 0 ? run(config_with("none", 1)) : Ended{};
  for (const int ranks : {2, 4}) {
    const TemporaryDirectory folder;
    const auto ends = in_ranks(ranks_in(folder.path(), ranks), [&] {
      const auto group = RankGroup::join(group_options());
      for (const auto& strategy : strategies) {
        train(group,
              {.config = config_with(strategy, ranks), .name = strategy});
      }
      group->leave();
    });
    if (child_rank() >= 0) continue;
    expect_all_well(ends);
    for (const auto& strategy : strategies) {
      SCOPED_TRACE(strategy);
      expect_same_losses(alone, ended(folder.path(), strategy));
    }
  }
}

// The backward accumulates directly into `.grad`, and a sharded update invalidates the
// copies of the weights.
TEST(RankedTraining, KeepsWeightCopiesUpToDate) {
  const auto config_with = [](const std::string& copies, int64_t ranks) {
    TrainConfig config = tied_config(ranks);
    config.steps = 12;
    config.weight_copies = from_text<WeightCopiesMode>(copies);
    return config;
  };
  const TemporaryDirectory folder;
  InRanks how{.ranks = 2};
  how.folder = folder.path();
  expect_all_well(in_ranks(how, [&] {
    const auto group = RankGroup::join(group_options());
    for (const char* precision : {"fp32", "bf16"}) {
      for (const auto shard : {Sharding::kNone, Sharding::kOptimizer}) {
        TrainConfig config = config_with("on", 2);
        config.precision = from_text<Precision>(precision);
        config.shard = shard;
        train(group, {.config = config, .name = precision + to_text(shard)});
      }
    }
    group->leave();
  }));
  if (child_rank() >= 0) return;
  expect_near(run(config_with("on", 1)), ended(folder.path(), "fp32none"),
              1e-4);
  expect_near(run(config_with("off", 1)), ended(folder.path(), "fp32none"),
              1e-4);
  TrainConfig half = config_with("on", 1);
  half.precision = Precision::kBf16;
  expect_near(run(half), ended(folder.path(), "bf16none"), 0.05);
  for (const char* precision : {"fp32", "bf16"}) {
    expect_near(ended(folder.path(), std::string(precision) + "none"),
                ended(folder.path(), std::string(precision) + "optimizer"),
                1e-5);
  }
}

TEST(RankedTraining, ShardsChannelsLastWeights) {
  const TemporaryDirectory folder;
  InRanks how{.ranks = 3};
  how.folder = folder.path();
  const auto config_on = [](const std::string& layout, int64_t ranks) {
    TrainConfig config = config_of(ranks);
    config.model = "cnn-basic";
    config.model_options = {};
    config.model_options.norm = "group";
    config.model_options.image_size = 28;
    config.optimizer.name = "adamw";
    config.steps = 6;
    config.layout = from_text<ImageLayout>(layout);
    return config;
  };
  expect_all_well(in_ranks(how, [&] {
    const auto group = RankGroup::join(group_options());
    TrainConfig config = config_on("channels-last", 3);
    train(group, {.config = config, .name = "whole"});
    config.shard = Sharding::kOptimizer;
    train(group, {.config = config, .stop_after = 3});
    train(group, {.config = config, .resume = true});
    group->leave();
  }));
  if (child_rank() >= 0) return;
  const Ended alone = run(config_on("planes", 1));
  expect_near(alone, ended(folder.path(), "whole"), 1e-4);
  expect_near(alone, ended(folder.path()), 1e-4);
}

TEST(RankedTraining, ResumesBitIdentically) {
  const TemporaryDirectory folder;
  InRanks how{.ranks = 2};
  how.folder = folder.path();
  expect_all_well(in_ranks(how, [] {
    TrainConfig config = config_of(2);
    config.model_options.dropout = 0.2;
    const auto group = RankGroup::join(group_options());
    train(group, {.config = config, .name = "whole"});
    // Only rank 1 is asked to stop; all ranks stop after the same window.
    const auto result =
        train(group, {.config = config, .stop_after = 7, .stop_rank = 1});
    EXPECT_TRUE(result.stopped);
    EXPECT_EQ(result.summary.steps, 7);
    train(group, {.config = config, .resume = true});
    group->leave();
  }));
  expect_equal(ended(folder.path(), "whole"), ended(folder.path()));
}

TEST(RankedTraining, ResumesWithADifferentNumberOfRanks) {
  const Ended alone = child_rank() < 0 ? run(config_of(1)) : Ended{};
  const TemporaryDirectory folder;
  int stop_at = 9;
  for (const int ranks : {4, 1, 3}) {
    const auto ends = in_ranks(ranks_in(folder.path(), ranks), [&] {
      TrainConfig config = config_of(4);
      config.share_among(ranks);
      train({.config = config,
             .resume = ranks != 4,
             .stop_after = ranks == 3 ? -1 : stop_at});
    });
    if (child_rank() < 0) expect_all_well(ends);
  }
  if (child_rank() >= 0) return;
  expect_near(alone, ended(folder.path()), 1e-4);
  EXPECT_EQ(losses(ended(folder.path()).metrics).size(), 50u);
}

// The state was saved by one process in the middle of a window.
TEST(RankedTraining, ResumesInTheMiddleOfAWindow) {
  TrainConfig config = config_of(1);
  config.steps = 4;
  const Ended alone = child_rank() < 0 ? run(config) : Ended{};
  const TemporaryDirectory folder;
  if (child_rank() < 0) {
    auto directory = RunDirectory::create(folder / "run", to_json(config));
    TrainRun how;
    how.directory = &directory;
    int left = 7;  // micro-batches: five in the first window
    how.stop = [&] { return left-- == 0; };
    Trainer trainer(make_inputs(config), config);
    ASSERT_TRUE(trainer.run(how).stopped);
  }
  InRanks how{.ranks = 2};
  how.folder = folder.path();
  const auto ends = in_ranks(how, [&] {
    TrainConfig shared = config;
    shared.share_among(2);
    train({.config = shared, .resume = true});
  });
  expect_all_well(ends);
  expect_near(alone, ended(folder.path()), 1e-5);
}

TEST(RankedTraining, RetriesAWindowOnAllRanks) {
  if (device().is_cuda())
    GTEST_SKIP() << "this test injects CPU allocation failures";
  const std::vector<int64_t> moments = {40, 180, 333, 533, 700};
  const TemporaryDirectory folder;
  InRanks how{.ranks = 2};
  how.folder = folder.path();
  expect_all_well(in_ranks(how, [&] {
    TrainConfig config = config_of(2);
    config.model_options.dropout = 0.2;
    config.steps = 6;
    const auto group = RankGroup::join(group_options());
    train(group, {.config = config});
    for (const int64_t after : moments) {
      train(group, {.config = config,
                    .name = std::to_string(after),
                    .failing_rank = 1,
                    .failing_after = after});
    }
    group->leave();
  }));
  const Ended calm = ended(folder.path());
  for (const int64_t after : moments) {
    expect_equal(calm, ended(folder.path(), std::to_string(after)));
  }
}

TrainConfig sharded_config(const std::string& optimizer) {
  TrainConfig config = config_of(2);
  config.optimizer.name = optimizer;
  if (optimizer == "sgd") config.optimizer.momentum = 0.9;
  config.clip = 0.5;
  config.steps = 12;
  config.save_every = 4;  // and before the end
  return config;
}

TEST(RankedTraining, ShardsTheOptimizerState) {
  const TemporaryDirectory folder;
  InRanks how{.ranks = 2, .variant = "two"};
  how.folder = folder.path();
  const std::vector<std::string> optimizers = {"adamw", "sgd"};
  expect_all_well(in_ranks(how, [&] {
    const auto group = RankGroup::join(group_options());
    for (const auto& optimizer : optimizers) {
      TrainConfig config = sharded_config(optimizer);
      train(group, {.config = config, .name = optimizer});
      config.shard = Sharding::kOptimizer;
      const auto summary =
          train(group, {.config = config, .name = optimizer + "-sharded"})
              .summary;
      const int64_t moments = optimizer == "adamw" ? 2 : 1;
      const int64_t half = summary.parameters * 4 * moments / 2;
      // Whole allocations are counted; CUDA's are rounded up to 512 bytes.
      EXPECT_NEAR(double(summary.memory[Category::kOptimizer]), double(half),
                  device().is_cuda() ? 8192 : 2048);
    }
    group->leave();
  }));
  // Resumed without sharding, on three ranks.
  how.ranks = 3;
  how.variant = "three";
  expect_all_well(in_ranks(how, [&] {
    const auto group = RankGroup::join(group_options());
    for (const auto& optimizer : optimizers) {
      TrainConfig config = sharded_config(optimizer);
      config.steps = 20;
      config.share_among(3);
      train(group,
            {.config = config, .name = optimizer + "-sharded", .resume = true});
    }
    group->leave();
  }));
  if (child_rank() >= 0) return;
  for (const auto& optimizer : optimizers) {
    TrainConfig config = sharded_config(optimizer);
    config.share_among(1);
    expect_near(run(config), ended(folder.path(), optimizer), 1e-4);
    config.steps = 20;
    expect_near(run(config), ended(folder.path(), optimizer + "-sharded"),
                1e-4);
  }
}

TEST(RankedTraining, RejectsOptimizersThatCannotBeSharded) {
  const auto ends = in_ranks({.ranks = 2}, [] {
    TrainConfig config = config_of(2);
    config.optimizer.name = "adafactor";
    config.shard = Sharding::kOptimizer;
    const auto group = RankGroup::join(group_options());
    Trainer trainer(make_inputs(config), config, {.ranks = group});
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.status, 3);
    EXPECT_NE(end.error.find("[--shard]"), std::string::npos) << end.error;
  }
}

TEST(RankedTraining, RejectsADifferentModelByName) {
  const auto ends = in_ranks({.ranks = 2}, [] {
    TrainConfig config = config_of(2);
    if (child_rank() == 1) config.model_options.width = 17;
    const auto group = RankGroup::join(group_options());
    Trainer trainer(make_inputs(config), config, {.ranks = group});
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.status, 3);
    EXPECT_NE(end.error.find("rank 1 has the model"), std::string::npos)
        << end.error;
  }
}

/// A planner whose second plan is smaller than its first.
class Shrinking final : public BudgetPlanner {
 public:
  explicit Shrinking(int stages) : stages_(stages) {}
  Plan decide() override { return plan(3, 2, "none", 1000); }
  std::optional<Plan> tighten(const Plan& present, int64_t) override {
    if (present.micro_batch == 1) return std::nullopt;
    return plan(1, 5, "all", 500);
  }

 private:
  Plan plan(int64_t micro_batch, int64_t accumulate, const char* strategy,
            int64_t peak_bytes) const {
    return {.micro_batch = micro_batch,
            .accumulate = accumulate,
            .schedule = make_schedule(strategy, stages_),
            .peak_bytes = peak_bytes,
            .step_ms = 1,
            .graph = true};
  }
  int stages_;
};

TEST(RankedTraining, UsesOnePlanOnAllRanks) {
  const TemporaryDirectory folder;
  InRanks how{.ranks = 2};
  how.folder = folder.path();
  expect_all_well(in_ranks(how, [] {
    TrainConfig config = config_of(2);
    config.steps = 6;
    config.batch = config.accumulate = 0;
    config.recompute = "optimal";
    config.memory_limit = 1;  // cannot be satisfied
    config.resolve();
    const auto group = RankGroup::join(group_options());
    const int stages = make_model("mlp", config.model_options).chain.size();
    // The plan of rank 0 is used by all ranks.
    auto planner = std::make_unique<Shrinking>(group->rank() == 0 ? stages : 1);
    Trainer trainer(make_inputs(config), config,
                    {.planner = std::move(planner), .ranks = group});
    const auto result = trainer.run();
    EXPECT_EQ(result.summary.micro_batch, 1);
    EXPECT_EQ(result.summary.accumulate, 5);
    EXPECT_EQ(result.summary.recompute, "all");
    EXPECT_EQ(result.summary.replans, 1);
    group->leave();
  }));
}

}  // namespace
}  // namespace reprise::testing
