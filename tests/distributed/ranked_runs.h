#pragma once

#include "ranks.h"
#include "temporary.h"
#include "train/runs.h"

#include <nlohmann/json.hpp>

#include <map>
#include <optional>
#include <sstream>

/// Helpers that run small trainings on several ranks and compare their results.
namespace reprise::testing {

/// Windows that two and four ranks cannot divide evenly; the last one is short.
inline TrainConfig config_of(int64_t ranks) {
  TrainConfig config = small();
  config.model_options.dropout = 0;
  config.random_samples = 37;
  config.batch = config.accumulate = 0;
  config.global_batch = 10;
  config.batch = 2;
  config.epochs = 0;
  config.steps = 50;
  // At three times this rate, rounding errors grow a hundredfold within fifty steps.
  config.rate.base = 0.003;
  config.bucket_bytes = 8192;
  config.workers = 1;
  config.ranks = ranks;
  config.resolve();
  return config;
}

/// What ranks can divide.
inline const std::vector<Sharding> kLevels = {
    Sharding::kOptimizer, Sharding::kGradients, Sharding::kParameters};

struct RankedRun {
  TrainConfig config;
  std::string name = "run";  ///< name of the run directory in child_folder()
  bool resume = false;
  int stop_after = -1;  ///< windows before `stop_rank` stops; -1: never
  int stop_rank = 0;
  int failing_rank = -1;  ///< rank in which an allocation fails; -1: none
  int64_t failing_after = 0;
};

/// Trains as one rank of `group`, in a run directory in child_folder().
inline TrainResult train(const std::shared_ptr<RankGroup>& group,
                         const RankedRun& options) {
  std::optional<RunDirectory> directory;
  const std::string path = child_folder() + "/" + options.name;
  if (group->rank() == 0) {
    directory.emplace(
        options.resume ? RunDirectory::open(path)
                       : RunDirectory::create(path, to_json(options.config)));
  }
  Trainer trainer(make_inputs(options.config), options.config,
                  {.ranks = group});
  TrainRun run;
  run.directory = directory ? &*directory : nullptr;
  run.resume = options.resume;
  int left = options.stop_after;
  run.stop = [&] { return group->rank() == options.stop_rank && --left == 0; };
  std::optional<AllocationFailure> failure;
  if (group->rank() == options.failing_rank)
    failure.emplace(options.failing_after);
  const TrainResult result = trainer.run(run);
  if (failure) {
    EXPECT_TRUE(failure->happened());
  }
  return result;
}

inline TrainResult train(const RankedRun& options) {
  const auto group = RankGroup::join(group_options());
  const TrainResult result = train(group, options);
  group->leave();
  return result;
}

/// Reads the final state and metrics of a run.
inline Ended ended(const std::string& folder, const std::string& name = "run") {
  const auto directory = RunDirectory::open(folder + "/" + name);
  Ended result;
  result.tensors =
      detail::newest_state(directory, [](const auto&) { FAIL(); })->tensors;
  result.metrics = read_text(directory.metrics_path());
  return result;
}

/// Expects the relative error of every model and optimizer tensor to be at most `most`.
inline void expect_near(const Ended& a, const Ended& b, double most) {
  std::map<std::string, torch::Tensor> other(b.tensors.begin(),
                                             b.tensors.end());
  int compared = 0;
  for (const auto& [name, tensor] : a.tensors) {
    if (name.starts_with("rng.")) continue;
    ASSERT_EQ(other.count(name), 1u) << name;
    if (!tensor.is_floating_point()) continue;
    // Squares have twice the relative error of the gradients.
    const double squares = name.find("exp_avg_sq") != name.npos ? 2 : 1;
    EXPECT_LE(relative_error(tensor, other[name]), squares * most) << name;
    ++compared;
  }
  EXPECT_GT(compared, 6);
}

inline void expect_equal(const Ended& a, const Ended& b) {
  expect_near(a, b, 0);
  EXPECT_EQ(a.metrics, b.metrics);
}

inline std::vector<double> losses(const std::string& metrics) {
  std::vector<double> list;
  std::istringstream lines(metrics);
  for (std::string line; std::getline(lines, line);) {
    list.push_back(nlohmann::json::parse(line).at("loss"));
  }
  return list;
}

/// Expects equal tensors, and the losses of fifty updates to be equal within 1e-5.
inline void expect_same_losses(const Ended& alone, const Ended& together) {
  expect_near(alone, together, 1e-4);
  const auto expected = losses(alone.metrics);
  const auto found = losses(together.metrics);
  ASSERT_EQ(expected.size(), 50u);
  ASSERT_EQ(found.size(), 50u);
  for (size_t i = 0; i < 50; ++i) {
    EXPECT_NEAR(found[i], expected[i], 1e-7 + 1e-5 * expected[i]) << i;
  }
}

/// A model whose embedding and head share their weight.
inline TrainConfig tied_config(int64_t ranks) {
  TrainConfig config = config_of(ranks);
  config.model = "gpt2";
  config.model_options.depth = 2;
  config.model_options.heads = 2;
  config.model_options.vocab = 24;
  config.model_options.seq = 6;
  config.optimizer.name = "sgd";  // the gradient of the keys' biases is zero
  config.optimizer.momentum = 0.9;
  return config;
}

}  // namespace reprise::testing
