#include "ranks.h"
#include "temporary.h"
#include "train/runs.h"

#include <reprise/models/model.h>
#include <reprise/recompute/strategy.h>

#include <nlohmann/json.hpp>

#include <sstream>

namespace reprise::testing {
namespace {

/// Whose windows are uneven for two and for four, with a short last one.
TrainConfig config_of(int64_t ranks) {
  TrainConfig config = small();
  config.model_options.dropout = 0;
  config.random_samples = 37;
  config.batch = config.accumulate = 0;
  config.global_batch = 10;
  config.batch = 2;
  config.epochs = 0;
  config.steps = 50;
  config.rate.base = 0.01;
  config.bucket_bytes = 8192;
  config.workers = 1;
  config.ranks = ranks;
  config.resolve();
  return config;
}

struct Part {
  TrainConfig config;
  std::string name = "run";  ///< of its directory in the folder
  bool resume = false;
  int stop_after = -1;    ///< windows
  int stop_rank = 0;      ///< that is told to
  int failing_rank = -1;  ///< in which an allocation fails
  int64_t failing_after = 0;
};

/// Of a rank: trains in the folder's run.
TrainResult train(const std::shared_ptr<RankGroup>& group, const Part& part) {
  std::optional<RunDirectory> directory;
  const std::string path = child_folder() + "/" + part.name;
  if (group->rank() == 0) {
    directory.emplace(part.resume ? RunDirectory::open(path)
                                  : RunDirectory::create(path, part.config));
  }
  Training training(part.config, nullptr, {}, group);
  TrainRun run;
  run.directory = directory ? &*directory : nullptr;
  run.resume = part.resume;
  int left = part.stop_after;
  run.stop = [&] { return group->rank() == part.stop_rank && --left == 0; };
  std::optional<AllocationFailure> failure;
  if (group->rank() == part.failing_rank) failure.emplace(part.failing_after);
  const TrainResult result = training.run(run);
  if (failure) {
    EXPECT_TRUE(failure->happened());
  }
  return result;
}

TrainResult train(const Part& part) {
  const auto group = RankGroup::join(group_options());
  const TrainResult result = train(group, part);
  group->leave();
  return result;
}

Ended ended(const std::string& folder, const std::string& name = "run") {
  const auto directory = RunDirectory::open(folder + "/" + name);
  Ended result;
  result.tensors = directory.newest([](const auto&) { FAIL(); })->tensors;
  result.metrics = read_text(directory.metrics_path());
  return result;
}

/// The tensors of the model and of the optimizer, as far apart as `most`.
void expect_near(const Ended& a, const Ended& b, double most) {
  std::map<std::string, torch::Tensor> other(b.tensors.begin(),
                                             b.tensors.end());
  int compared = 0;
  for (const auto& [name, tensor] : a.tensors) {
    if (name.starts_with("rng.")) continue;
    ASSERT_EQ(other.count(name), 1u) << name;
    if (!tensor.is_floating_point()) continue;
    EXPECT_LE(relative_error(tensor, other[name]), most) << name;
    ++compared;
  }
  EXPECT_GT(compared, 6);
}

void expect_equal(const Ended& a, const Ended& b) {
  expect_near(a, b, 0);
  EXPECT_EQ(a.metrics, b.metrics);
}

std::vector<double> losses(const std::string& metrics) {
  std::vector<double> list;
  std::istringstream lines(metrics);
  for (std::string line; std::getline(lines, line);) {
    list.push_back(nlohmann::json::parse(line).at("loss"));
  }
  return list;
}

TEST(RankedTraining, HasTheLossesOfOneProcess) {
  const Ended alone = child_rank() < 0 ? run(config_of(1)) : Ended{};
  for (const int ranks : {2, 4}) {
    const TemporaryDirectory folder;
    InRanks how{.ranks = ranks, .variant = std::to_string(ranks)};
    how.folder = folder.path();
    const auto ends = in_ranks(how, [&] {
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
    const Ended together = ended(folder.path());
    expect_near(alone, together, 1e-4);
    const auto expected = losses(alone.metrics);
    const auto found = losses(together.metrics);
    ASSERT_EQ(expected.size(), 50u);
    ASSERT_EQ(found.size(), 50u);
    for (size_t i = 0; i < 50; ++i) {
      EXPECT_NEAR(found[i], expected[i], 1e-7 + 1e-5 * expected[i]);
    }
  }
}

TEST(RankedTraining, GoesOnAsIfItHadNotStopped) {
  const TemporaryDirectory folder;
  InRanks how{.ranks = 2};
  how.folder = folder.path();
  expect_all_well(in_ranks(how, [] {
    TrainConfig config = config_of(2);
    config.model_options.dropout = 0.2;
    const auto group = RankGroup::join(group_options());
    train(group, {.config = config, .name = "whole"});
    // Rank 1 is told to stop, all do, after the same window.
    const auto result =
        train(group, {.config = config, .stop_after = 7, .stop_rank = 1});
    EXPECT_TRUE(result.stopped);
    EXPECT_EQ(result.summary.steps, 7);
    train(group, {.config = config, .resume = true});
    group->leave();
  }));
  expect_equal(ended(folder.path(), "whole"), ended(folder.path()));
}

TEST(RankedTraining, GoesOnWithAnotherNumberOfRanks) {
  const Ended alone = child_rank() < 0 ? run(config_of(1)) : Ended{};
  const TemporaryDirectory folder;
  int stop_at = 9;
  for (const int ranks : {4, 1, 3}) {
    InRanks how{.ranks = ranks, .variant = std::to_string(ranks)};
    how.folder = folder.path();
    const auto ends = in_ranks(how, [&] {
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

// A state that one process has left in the midst of a window.
TEST(RankedTraining, TakesOverAWindowThatIsOpen) {
  TrainConfig config = config_of(1);
  config.steps = 4;
  const Ended alone = child_rank() < 0 ? run(config) : Ended{};
  const TemporaryDirectory folder;
  if (child_rank() < 0) {
    auto directory = RunDirectory::create(folder / "run", config);
    TrainRun how;
    how.directory = &directory;
    int left = 7;  // micro-batches: five in the first window
    how.stop = [&] { return left-- == 0; };
    Training training(config);
    ASSERT_TRUE(training.run(how).stopped);
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

TEST(RankedTraining, StartsAWindowAgainOnAllRanks) {
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

TrainConfig divided_config(const std::string& optimizer) {
  TrainConfig config = config_of(2);
  config.optimizer.name = optimizer;
  if (optimizer == "sgd") config.optimizer.momentum = 0.9;
  config.clip = 0.5;
  config.steps = 12;
  config.save_every = 4;  // on the way too
  return config;
}

TEST(RankedTraining, DividesTheOptimizersState) {
  const TemporaryDirectory folder;
  InRanks how{.ranks = 2, .variant = "two"};
  how.folder = folder.path();
  const std::vector<std::string> optimizers = {"adamw", "sgd"};
  expect_all_well(in_ranks(how, [&] {
    const auto group = RankGroup::join(group_options());
    for (const auto& optimizer : optimizers) {
      TrainConfig config = divided_config(optimizer);
      train(group, {.config = config, .name = optimizer});
      config.shard = "optimizer";
      const auto summary =
          train(group, {.config = config, .name = optimizer + "-divided"})
              .summary;
      const int64_t moments = optimizer == "adamw" ? 2 : 1;
      const int64_t half = summary.parameters * 4 * moments / 2;
      // Whole allocations are counted.
      EXPECT_NEAR(double(summary.memory[Category::kOptimizer]), double(half),
                  2048);
    }
    group->leave();
  }));
  // Goes on undivided, with three.
  how.ranks = 3;
  how.variant = "three";
  expect_all_well(in_ranks(how, [&] {
    const auto group = RankGroup::join(group_options());
    for (const auto& optimizer : optimizers) {
      TrainConfig config = divided_config(optimizer);
      config.steps = 20;
      config.share_among(3);
      train(group,
            {.config = config, .name = optimizer + "-divided", .resume = true});
    }
    group->leave();
  }));
  if (child_rank() >= 0) return;
  for (const auto& optimizer : optimizers) {
    TrainConfig config = divided_config(optimizer);
    config.share_among(1);
    expect_near(run(config), ended(folder.path(), optimizer), 1e-4);
    config.steps = 20;
    expect_near(run(config), ended(folder.path(), optimizer + "-divided"),
                1e-4);
  }
}

TEST(RankedTraining, RefusesWhatCannotBeDivided) {
  const auto ends = in_ranks({.ranks = 2}, [] {
    TrainConfig config = config_of(2);
    config.optimizer.name = "adafactor";
    config.shard = "optimizer";
    const auto group = RankGroup::join(group_options());
    Training training(config, nullptr, {}, group);
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.status, 3);
    EXPECT_NE(end.error.find("[--shard]"), std::string::npos) << end.error;
  }
}

TEST(RankedTraining, RefusesAnotherModelByName) {
  const auto ends = in_ranks({.ranks = 2}, [] {
    TrainConfig config = config_of(2);
    if (child_rank() == 1) config.model_options.width = 17;
    const auto group = RankGroup::join(group_options());
    Training training(config, nullptr, {}, group);
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.status, 3);
    EXPECT_NE(end.error.find("rank 1 has the model"), std::string::npos)
        << end.error;
  }
}

/// Answers the same to all who ask, and less each time.
class Shrinking final : public BudgetPlanner {
 public:
  explicit Shrinking(int stages) : stages_(stages) {}
  Decision decide() override {
    return {3, 2, make_schedule("none", stages_), 1000, 1, "first"};
  }
  std::optional<Decision> tighten(const Decision& present, int64_t) override {
    if (present.micro_batch == 1) return std::nullopt;
    return Decision{1, 5, make_schedule("all", stages_), 500, 1, "second"};
  }

 private:
  int stages_;
};

TEST(RankedTraining, PlansTheSameOnAllRanks) {
  const TemporaryDirectory folder;
  InRanks how{.ranks = 2};
  how.folder = folder.path();
  expect_all_well(in_ranks(how, [] {
    TrainConfig config = config_of(2);
    config.steps = 6;
    config.batch = config.accumulate = 0;
    config.recompute = "optimal";
    config.memory_limit = 1;  // nothing keeps it
    config.resolve();
    const auto group = RankGroup::join(group_options());
    const int stages = make_model("mlp", config.model_options).chain.size();
    // The first rank's counts; the others would be another one.
    auto planner = std::make_unique<Shrinking>(group->rank() == 0 ? stages : 1);
    Training training(config, std::move(planner), {}, group);
    const auto result = training.run();
    EXPECT_EQ(result.summary.micro_batch, 1);
    EXPECT_EQ(result.summary.accumulate, 5);
    EXPECT_EQ(result.summary.recompute, "all");
    EXPECT_EQ(result.summary.replans, 1);
    group->leave();
  }));
}

}  // namespace
}  // namespace reprise::testing
