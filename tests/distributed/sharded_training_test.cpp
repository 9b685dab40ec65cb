// Trainings whose state is divided among ranks. The truth is the same training in one process.
#include "ranked_runs.h"

#include <reprise/models/model.h>

#include <fstream>
#include <iomanip>

namespace reprise::testing {
namespace {

TEST(ShardedTraining, MatchesTheLossesOfOneProcess) {
  const auto config_with = [](Sharding shard, int64_t ranks) {
    TrainConfig config = tied_config(ranks);
    config.shard = shard;
    return config;
  };
  const Ended alone =
      child_rank() < 0 ? run(config_with(Sharding::kNone, 1)) : Ended{};
  for (const int ranks : {1, 2, 3, 4}) {
    const TemporaryDirectory folder;
    const auto ends = in_ranks(ranks_in(folder.path(), ranks), [&] {
      const auto group = RankGroup::join(group_options());
      for (const Sharding shard : kLevels) {
        train(group,
              {.config = config_with(shard, ranks), .name = to_text(shard)});
      }
      group->leave();
    });
    if (child_rank() >= 0) continue;
    expect_all_well(ends);
    for (const Sharding shard : kLevels) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + to_text(shard));
      expect_same_losses(alone, ended(folder.path(), to_text(shard)));
    }
  }
}

TEST(ShardedTraining, DividesParametersWithEveryStrategy) {
  const std::vector<std::string> strategies = {
      "none", "all", "sqrt", "every:2", "checkpoints:1", "revolve:2"};
  const auto config_with = [](const std::string& strategy, int64_t ranks) {
    TrainConfig config = tied_config(ranks);
    config.recompute = strategy;
    config.shard = ranks > 1 ? Sharding::kParameters : Sharding::kNone;
    return config;
  };
  const Ended alone = child_rank() < 0 ? run(config_with("none", 1)) : Ended{};
  const TemporaryDirectory folder;
  const auto ends = in_ranks(ranks_in(folder.path(), 2), [&] {
    const auto group = RankGroup::join(group_options());
    for (const auto& strategy : strategies) {
      train(group, {.config = config_with(strategy, 2), .name = strategy});
    }
    group->leave();
  });
  if (child_rank() >= 0) return;
  expect_all_well(ends);
  for (const auto& strategy : strategies) {
    SCOPED_TRACE(strategy);
    expect_same_losses(alone, ended(folder.path(), strategy));
  }
}

/// Images, with BatchNorm over the micro-batches of all ranks, and weights of odd sizes.
TrainConfig image_config(Sharding shard, int64_t ranks) {
  TrainConfig config = config_of(ranks);
  config.model = "cnn-basic";
  config.model_options = {};
  config.model_options.image_size = 28;
  config.optimizer.name =
      "sgd";  // the gradient of a bias before a BatchNorm is zero
  config.global_batch = 12;
  config.batch = 12 / ranks;
  config.accumulate = 1;
  config.random_samples = 48;  // no short window, whose statistics differ
  config.steps = 6;
  config.sync_norm = ranks > 1;
  config.shard = shard;
  config.resolve();
  return config;
}

TEST(ShardedTraining, SynchronizesNorms) {
  const Ended alone =
      child_rank() < 0 ? run(image_config(Sharding::kNone, 1)) : Ended{};
  const TemporaryDirectory folder;
  const auto ends = in_ranks(ranks_in(folder.path(), 3), [&] {
    const auto group = RankGroup::join(group_options());
    for (const Sharding shard : kLevels) {
      train(group, {.config = image_config(shard, 3), .name = to_text(shard)});
    }
    group->leave();
  });
  if (child_rank() >= 0) return;
  expect_all_well(ends);
  for (const Sharding shard : kLevels) {
    SCOPED_TRACE(to_text(shard));
    const auto expected = losses(alone.metrics);
    const auto found = losses(ended(folder.path(), to_text(shard)).metrics);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_NEAR(found[i], expected[i], 1e-5 * expected[i]) << i;
    }
  }
}

// The last batches of the test data are shared by fewer ranks than there are.
TEST(ShardedTraining, EvaluatesInStep) {
  const auto config_on = [](int64_t ranks) {
    TrainConfig config = config_of(ranks);
    config.steps = 3;
    return config;
  };
  const auto loss = [](const TrainConfig& config,
                       const std::shared_ptr<RankGroup>& group) {
    TrainInputs inputs = make_inputs(config);
    inputs.data.test = inputs.data.train;  // 37 samples
    Trainer trainer(std::move(inputs), config, {.ranks = group});
    return trainer.run({}).summary.eval_loss.value();
  };
  const double alone = child_rank() < 0 ? loss(config_on(1), nullptr) : 0;
  const TemporaryDirectory folder;
  const auto ends = in_ranks(ranks_in(folder.path(), 3), [&] {
    const auto group = RankGroup::join(group_options());
    TrainConfig config = config_on(3);
    config.shard = Sharding::kParameters;
    const double found = loss(config, group);
    if (group->rank() == 0) {
      std::ofstream(child_folder() + "/loss") << std::setprecision(12) << found;
    }
    group->leave();
  });
  if (child_rank() >= 0) return;
  expect_all_well(ends);
  double found = 0;
  std::ifstream(folder.path() + "/loss") >> found;
  EXPECT_NEAR(found, alone, 1e-5 * alone);
}

TEST(ShardedTraining, DividesFrozenWeights) {
  const auto config_with = [](Sharding shard, int64_t ranks) {
    TrainConfig config = tied_config(ranks);
    config.model_options.width = 64;
    config.model_options.depth = 8;
    config.steps = 6;
    config.lora.rank = 2;
    config.shard = shard;
    return config;
  };
  const TemporaryDirectory folder;
  const auto ends = in_ranks(ranks_in(folder.path(), 2), [&] {
    const auto group = RankGroup::join(group_options());
    const auto whole =
        train(group, {.config = config_with(Sharding::kNone, 2), .name = "a"});
    const auto divided = train(
        group, {.config = config_with(Sharding::kParameters, 2), .name = "b"});
    const auto bytes = [](const TrainResult& result) {
      return double(result.summary.memory[Category::kParameters]);
    };
    // Half, and two of ten stages while they run.
    EXPECT_LT(bytes(divided), 0.8 * bytes(whole));
    group->leave();
  });
  if (child_rank() >= 0) return;
  expect_all_well(ends);
  const Ended whole = ended(folder.path(), "a");
  const Ended divided = ended(folder.path(), "b");
  const std::map<std::string, torch::Tensor> found(divided.tensors.begin(),
                                                   divided.tensors.end());
  for (const auto& [name, tensor] : whole.tensors) {
    if (!name.starts_with("parameter.")) continue;
    EXPECT_TRUE(torch::allclose(found.at(name), tensor, 1e-5, 1e-7)) << name;
  }
}

/// Weights that are read in half precision only may travel so: nothing else changes.
TEST(ShardedTraining, GathersInHalfPrecisionExactly) {
  const std::vector<std::string> models = {"gpt2", "bert-base", "vit-b-16",
                                           "cnn-basic", "llama-small"};
  const auto config_with = [](const std::string& model, Sharding shard) {
    TrainConfig config = config_of(2);
    config.model = model;
    config.model_options = {};
    ModelOptions& m = config.model_options;
    if (model == "cnn-basic") {
      config = image_config(shard, 2);
    } else {
      if (model != "llama-small") m.dropout = 0;
      m.depth = 2;
      m.width = 16;
      m.heads = 2;
      if (model == "vit-b-16") {
        m.image_size = 32;
      } else {
        m.vocab = 24;
        m.seq = 6;
      }
    }
    config.precision = Precision::kBf16;
    config.steps = 6;
    config.shard = shard;
    config.resolve();
    return config;
  };
  const TemporaryDirectory folder;
  expect_all_well(in_ranks(ranks_in(folder.path(), 2), [&] {
    const auto group = RankGroup::join(group_options());
    for (const auto& model : models) {
      SCOPED_TRACE(model);
      for (const Sharding shard :
           {Sharding::kGradients, Sharding::kParameters}) {
        const TrainConfig config = config_with(model, shard);
        const auto result =
            train(group, {.config = config, .name = model + to_text(shard)});
        if (shard != Sharding::kParameters || model == "cnn-basic") continue;
        // Less than in full precision, which 2 gathers per micro-batch would be.
        const auto inputs = make_inputs(config);
        int64_t bytes = 0;
        for (const auto& p : inputs.model.root->parameters()) {
          bytes += static_cast<int64_t>(p.nbytes());
        }
        EXPECT_LT(result.summary.gather_bytes,
                  6 * config.accumulate * 2 * bytes * 3 / 4);
      }
    }
    group->leave();
  }));
  if (child_rank() >= 0) return;
  for (const auto& model : models) {
    SCOPED_TRACE(model);
    const Ended full =
        ended(folder.path(), model + to_text(Sharding::kGradients));
    const Ended half =
        ended(folder.path(), model + to_text(Sharding::kParameters));
    expect_near(full, half, device().is_cuda() ? 1e-5 : 0);
    EXPECT_EQ(losses(full.metrics), losses(half.metrics));
  }
}

/// Groups of ranks that each have a copy of the state.
TEST(ShardedTraining, DividesWithinGroups) {
  const auto config_with = [](Sharding shard, int64_t ranks, int64_t group) {
    TrainConfig config = tied_config(ranks);
    config.clip = 0.05;
    config.shard = shard;
    config.shard_group = group;
    config.resolve();
    return config;
  };
  const Ended alone =
      child_rank() < 0 ? run(config_with(Sharding::kNone, 1, 0)) : Ended{};
  const TemporaryDirectory folder;
  const auto ends = in_ranks(ranks_in(folder.path(), 4), [&] {
    const auto group = RankGroup::join(group_options());
    for (const Sharding shard : kLevels) {
      for (const int64_t size : {1, 2}) {
        const std::string name = to_text(shard) + std::to_string(size);
        const TrainConfig config = config_with(shard, 4, size);
        train(group, {.config = config, .name = name, .stop_after = 20});
        const auto result =
            train(group, {.config = config, .name = name, .resume = true});
        const auto inputs = make_inputs(config);
        double all = 0;
        for (const auto& p : inputs.model.root->parameters()) {
          all += double(p.nbytes());
        }
        const double state =
            double(result.summary.memory[Category::kOptimizer]);
        EXPECT_NEAR(state, all / double(size), 0.1 * all) << name;
      }
    }
    group->leave();
  });
  if (child_rank() >= 0) return;
  expect_all_well(ends);
  for (const Sharding shard : kLevels) {
    for (const int size : {1, 2}) {
      SCOPED_TRACE(to_text(shard) + " in groups of " + std::to_string(size));
      expect_same_losses(
          alone, ended(folder.path(), to_text(shard) + std::to_string(size)));
    }
  }
}

TEST(ShardedTraining, ResumesWithOtherRanksAndLevels) {
  const Ended alone = child_rank() < 0 ? run(config_of(1)) : Ended{};
  const TemporaryDirectory folder;
  struct Part {
    int ranks;
    Sharding shard;
    int stop_after;
    int group = 0;
  };
  const std::vector<Part> parts = {{3, Sharding::kParameters, 9},
                                   {2, Sharding::kGradients, 9},
                                   {1, Sharding::kNone, 9},
                                   {4, Sharding::kParameters, 9, /*group=*/2},
                                   {5, Sharding::kParameters, -1}};
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    const auto ends = in_ranks(ranks_in(folder.path(), part.ranks), [&] {
      TrainConfig config = config_of(4);
      config.share_among(part.ranks);
      config.shard = part.shard;
      config.shard_group = part.group;
      train({.config = config, .resume = i > 0, .stop_after = part.stop_after});
    });
    if (child_rank() < 0) expect_all_well(ends);
  }
  if (child_rank() >= 0) return;
  expect_near(alone, ended(folder.path()), 1e-4);
  EXPECT_EQ(losses(ended(folder.path()).metrics).size(), 50u);
}

TEST(ShardedTraining, ResumesBitIdentically) {
  const TemporaryDirectory folder;
  expect_all_well(in_ranks(ranks_in(folder.path(), 2), [] {
    const auto group = RankGroup::join(group_options());
    for (const Sharding shard : kLevels) {
      TrainConfig config = config_of(2);
      config.model_options.dropout = 0.2;
      config.optimizer.name = "adamw";
      config.steps = 20;
      config.shard = shard;
      const std::string name = to_text(shard);
      train(group, {.config = config, .name = name + "-whole"});
      train(group, {.config = config, .name = name, .stop_after = 7});
      train(group, {.config = config, .name = name, .resume = true});
    }
    group->leave();
  }));
  if (child_rank() >= 0) return;
  for (const Sharding shard : kLevels) {
    expect_equal(ended(folder.path(), to_text(shard) + "-whole"),
                 ended(folder.path(), to_text(shard)));
  }
}

TEST(ShardedTraining, RetriesAWindowOnAllRanks) {
  if (device().is_cuda()) {
    GTEST_SKIP() << "this test injects CPU allocation failures";
  }
  const TemporaryDirectory folder;
  std::vector<int64_t> moments;
  for (int64_t after = 20; after < 700; after += 29) moments.push_back(after);
  const auto name = [](Sharding shard, int64_t after) {
    return to_text(shard) + std::to_string(after);
  };
  const std::vector<Sharding> levels = {Sharding::kGradients,
                                        Sharding::kParameters};
  InRanks how = ranks_in(folder.path(), 2);
  how.timeout_s = 60;
  expect_all_well(in_ranks(how, [&] {
    const auto group = RankGroup::join(group_options());
    for (const Sharding shard : levels) {
      TrainConfig config = config_of(2);
      config.model_options.dropout = 0.2;
      config.steps = 6;
      config.shard = shard;
      train(group, {.config = config, .name = name(shard, 0)});
      for (const int64_t after : moments) {
        SCOPED_TRACE(name(shard, after));
        train(group, {.config = config,
                      .name = name(shard, after),
                      .failing_rank = 1,
                      .failing_after = after});
      }
    }
    group->leave();
  }));
  if (child_rank() >= 0) return;
  for (const Sharding shard : levels) {
    const Ended calm = ended(folder.path(), name(shard, 0));
    for (const int64_t after : moments) {
      SCOPED_TRACE(name(shard, after));
      expect_equal(calm, ended(folder.path(), name(shard, after)));
    }
  }
}

}  // namespace
}  // namespace reprise::testing
