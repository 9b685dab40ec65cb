// Memory of trainings whose state is divided among ranks, and the bytes that they exchange.
#include "ranked_runs.h"
#include "train/step/host_state_runs.h"

#include <reprise/models/model.h>

namespace reprise::testing {
namespace {

/// A model whose layers have 64 KiB each, so that little is lost by alignment.
TrainConfig wide_config(Sharding shard, int64_t ranks) {
  TrainConfig config = config_of(ranks);
  config.model_options.width = 128;
  config.model_options.depth = 8;
  config.optimizer.name = "adamw";
  config.global_batch = 8;
  config.batch = 2;
  config.accumulate = 0;
  config.random_samples = 24;
  config.steps = 4;
  config.recompute = "all";
  config.shard = shard;
  config.resolve();
  return config;
}

TEST(ShardedMemory, SendsWhatTheoryAsksFor) {
  for (const int ranks : {2, 4}) {
    expect_all_well(in_ranks(ranks_in("", ranks), [&] {
      const auto group = RankGroup::join(group_options());
      std::vector<Sharding> all = kLevels;
      all.push_back(Sharding::kNone);
      for (const Sharding shard : all) {
        SCOPED_TRACE(to_text(shard));
        const TrainConfig config = wide_config(shard, ranks);
        TrainInputs inputs = make_inputs(config);
        const int stages = inputs.model.chain.size();
        int64_t bytes = 0;
        for (const auto& p : inputs.model.root->parameters()) {
          bytes += static_cast<int64_t>(p.nbytes());
        }
        int64_t last = 0;  // of the two stages at which the forward turns
        for (const int i : {stages - 2, stages - 1}) {
          for (const auto& module : inputs.model.chain[i].modules()) {
            for (const auto& p : module->parameters()) {
              last += static_cast<int64_t>(p.nbytes());
            }
          }
        }
        Trainer trainer(std::move(inputs), config, {.ranks = group});
        const TrainSummary s = trainer.run({}).summary;
        const auto near = [](int64_t found, int64_t expected) {
          return found >= expected && found <= expected + expected / 50;
        };
        EXPECT_TRUE(near(s.reduce_bytes, 4 * bytes)) << s.reduce_bytes;
        const int64_t micro_batches = 4 * config.accumulate;
        // The last two stages stay from their forward to their backward.
        const int64_t gathered = shard == Sharding::kNone ? 0
                                 : shard == Sharding::kParameters
                                     ? micro_batches * (2 * bytes - last)
                                     : 4 * bytes;
        EXPECT_TRUE(near(s.gather_bytes, gathered))
            << s.gather_bytes << " instead of " << gathered;
      }
      group->leave();
    }));
  }
}

/// What a rank keeps of the optimizer's state may be in host memory.
TEST(ShardedMemory, KeepsStateInHostMemory) {
  const auto name = [](Sharding shard, StatePlace state) {
    return to_text(shard) + "-" + to_text(state);
  };
  std::vector<Sharding> levels = kLevels;
  levels.push_back(Sharding::kNone);
  const TemporaryDirectory folder;
  expect_all_well(in_ranks(ranks_in(folder.path(), 2), [&] {
    const Host host;
    const auto group = RankGroup::join(group_options());
    for (const Sharding shard : levels) {
      for (const StatePlace state : {StatePlace::kDevice, StatePlace::kHost}) {
        TrainConfig config = config_of(2);
        config.optimizer.name = "adamw";
        config.steps = 12;
        config.shard = shard;
        config.state = state;
        config.resolve();
        // Resumed with the state in the other place.
        const auto first = train(
            group,
            {.config = config, .name = name(shard, state), .stop_after = 5});
        EXPECT_EQ(first.summary.host_state_bytes > 0,
                  state == StatePlace::kHost);
        config.state = state == StatePlace::kHost && shard != Sharding::kNone
                           ? StatePlace::kDevice
                           : state;
        const auto result = train(
            group,
            {.config = config, .name = name(shard, state), .resume = true});
        EXPECT_EQ(result.summary.host_state_bytes > 0,
                  config.state == StatePlace::kHost);
      }
    }
    group->leave();
  }));
  if (child_rank() >= 0) return;
  for (const Sharding shard : levels) {
    SCOPED_TRACE(to_text(shard));
    expect_equal(ended(folder.path(), name(shard, StatePlace::kDevice)),
                 ended(folder.path(), name(shard, StatePlace::kHost)));
  }
}

/// A budget that the state does not fit into on the device.
TEST(ShardedMemory, PlansForStateInHostMemory) {
  expect_all_well(in_ranks({.ranks = 2}, [] {
    const Host host(int64_t{1} << 30, /*chunk=*/16384);
    const auto group = RankGroup::join(group_options());
    for (const Sharding shard : kLevels) {
      SCOPED_TRACE(to_text(shard));
      TrainConfig config = wide_config(shard, 2);
      config.steps = 8;
      config.state = StatePlace::kDevice;
      const auto trained = [&](const TrainConfig& with) {
        Trainer trainer(make_inputs(with), with, {.ranks = group});
        return trainer.run({}).summary;
      };
      const TrainSummary resident = trained(config);
      const int64_t state = resident.memory[Category::kOptimizer];
      config.recompute = "";
      config.batch = config.accumulate = 0;
      config.state = StatePlace::kAuto;
      config.memory_limit = resident.peak_bytes - state / 3;
      config.resolve();
      const TrainSummary within = trained(config);
      EXPECT_GT(within.host_state_bytes, 0);
      EXPECT_LE(within.peak_bytes, config.memory_limit);
      EXPECT_NEAR(*within.loss, *resident.loss, 1e-5);
    }
    group->leave();
  }));
}

TEST(ShardedMemory, PredictsThePeak) {
  if (device().is_cuda())
    GTEST_SKIP() << "workspaces are larger than the model";
  expect_all_well(in_ranks({.ranks = 2}, [] {
    const auto group = RankGroup::join(group_options());
    std::vector<Sharding> levels = kLevels;
    levels.push_back(Sharding::kNone);
    for (const Sharding shard : levels) {
      // One and several buckets, one and several micro-batches, both types on the way.
      for (const int64_t bucket : {64 << 10, 32 << 20}) {
        for (const int64_t batch : {1, 4}) {
          for (const ReduceType type : {ReduceType::kFp32, ReduceType::kBf16}) {
            TrainConfig config = wide_config(shard, 2);
            config.accumulate = 0;
            config.batch = batch;
            config.bucket_bytes = bucket;
            config.reduce = type;
            config.recompute = "";
            config.memory_limit = int64_t{32} << 20;
            config.resolve();
            Trainer trainer(make_inputs(config), config, {.ranks = group});
            const TrainSummary s = trainer.run({}).summary;
            const double ratio =
                double(s.predicted.value().peak_bytes) / double(s.peak_bytes);
            EXPECT_NEAR(ratio, 1, 0.03)
                << to_text(shard) << " " << bucket << " " << batch << " "
                << to_text(type) << ": " << s.peak_bytes << " in "
                << s.peak_phase << " " << s.peak_stage << ", recompute "
                << s.recompute << "\n"
                << to_table(s);
          }
        }
      }
    }
    group->leave();
  }));
}

// What a rank has at the peak of a window: its share, two stages and two buckets.
TEST(ShardedMemory, DividesMemoryAmongRanks) {
  const TemporaryDirectory folder;
  for (const int ranks : {1, 2, 4}) {
    expect_all_well(in_ranks(ranks_in(folder.path(), ranks), [&] {
      const auto group = RankGroup::join(group_options());
      for (const Sharding shard : kLevels) {
        SCOPED_TRACE(to_text(shard) + " " + std::to_string(ranks));
        TrainConfig config = wide_config(shard, ranks);
        config.global_batch = 2 * ranks;  // one micro-batch
        config.accumulate = 0;
        config.resolve();
        TrainInputs inputs = make_inputs(config);
        double all = 0, largest = 0;
        for (int i = 0; i < inputs.model.chain.size(); ++i) {
          double stage = 0;
          for (const auto& module : inputs.model.chain[i].modules()) {
            for (const auto& p : module->parameters()) {
              stage += double(p.nbytes());
            }
          }
          all += stage;
          largest = std::max(largest, stage);
        }
        Trainer trainer(std::move(inputs), config, {.ranks = group});
        const TrainSummary s = trainer.run({}).summary;
        const double share = all / ranks;
        const double optimizer = double(s.memory[Category::kOptimizer]);
        EXPECT_NEAR(optimizer, 2 * share, 0.05 * 2 * share);
        const double parameters = double(s.memory[Category::kParameters]);
        const bool divided = shard == Sharding::kParameters;
        EXPECT_LE(parameters, 1.05 * (divided ? share : all) +
                                  (divided ? 2.1 * largest : 0));
        EXPECT_GE(parameters, divided ? share : all);
        if (shard != Sharding::kOptimizer) {
          // Nothing but a stage's gradients at a time, and their sums.
          EXPECT_LE(double(s.memory[Category::kGradients]),
                    1.05 * share + 2.1 * largest + 3 * 8192);
        }
      }
      group->leave();
    }));
  }
}

}  // namespace
}  // namespace reprise::testing
