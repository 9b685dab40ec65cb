#include "distributed/sync_batch_norm.h"

#include "compat/process_group.h"
#include "ranked_runs.h"
#include "train/step/step_graphs.h"

#include <reprise/models/model.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>

namespace reprise::testing {
namespace {

Model make(torch::ScalarType type) {
  torch::manual_seed(3);
  ModelOptions options;
  options.depth = 3;
  options.width = 4;
  options.image_size = 8;
  Model model = make_model("cnn-blocks", options);
  model.root->to(type);
  model.root->train();
  return model;
}

std::vector<torch::Tensor> results(const Model& model) {
  auto list = take_gradients(model.root->parameters());
  for (const auto& buffer : model.root->buffers()) {
    list.push_back(buffer.to(torch::kDouble).clone());
  }
  return list;
}

/// Runs two windows and compares the gradients of the second and the running statistics.
void compare(const std::shared_ptr<RankGroup>& group, torch::ScalarType type,
             const std::string& strategy, int64_t window, double most) {
  torch::manual_seed(8);
  const Model whole = make(type);
  const Model model = make(type);
  const auto& o = model.options;
  const auto x = torch::randn({window, o.channels, 8, 8}, type) * 2 + 1;
  const auto t = torch::randint(o.classes, {window}, torch::kLong);
  Execution plain(whole.chain, make_schedule("none", whole.chain.size()));
  Execution execution(model.chain, make_schedule(strategy, model.chain.size()));
  const auto norms = std::make_shared<SyncBatchNormGroup>(group, 16);

  // The first ranks may have one sample more; some ranks may have none.
  const int64_t ranks = group->size(), me = group->rank();
  const int64_t size = window / ranks + (me < window % ranks ? 1 : 0);
  const int64_t first = me * (window / ranks) + std::min(me, window % ranks);
  std::vector<torch::Tensor> wanted, found;
  for (int i = 0; i < 2; ++i) {
    for (const auto& p : model.root->parameters()) p.mutable_grad().reset();
    for (const auto& p : whole.root->parameters()) p.mutable_grad().reset();
    const auto input = x * (i + 1);
    auto outputs = plain.forward({input, t});
    plain.backward({torch::ones_like(outputs[0])});
    norms->open();
    {
      const SyncBatchNormScope scope(norms, /*counts=*/size > 0);
      const int64_t from = size > 0 ? first : 0;
      const int64_t count = std::max<int64_t>(size, 1);
      outputs = execution.forward(
          {input.narrow(0, from, count), t.narrow(0, from, count)});
      execution.backward({torch::full_like(outputs[0], size > 0 ? 1 : 0)});
    }
    norms->close();
  }
  wanted = results(whole);
  found = results(model);
  const size_t gradients = model.root->parameters().size();
  double norm = 0;
  for (size_t i = 0; i < gradients; ++i) {
    norm += wanted[i].square().sum().item<double>();
  }
  norm = std::sqrt(norm);
  for (size_t i = 0; i < found.size(); ++i) {
    if (i < gradients) {
      auto work = group->all_reduce(found[i]);
      group->wait(work);
    }
    // The gradient of a bias before a norm is zero up to rounding.
    const double whole = std::max(wanted[i].norm().item<double>(),
                                  i < gradients ? 0.01 * norm : 0.0);
    EXPECT_LT((wanted[i] - found[i]).norm().item<double>(), most * whole)
        << strategy << " window " << window << " number " << i;
  }
  // One call per run of a norm, forward or recomputation, one per backward, and the closing
  // call of each window.
  const auto schedule = make_schedule(strategy, model.chain.size());
  int64_t runs = 0;
  for (int i = 0; i < o.depth; ++i) runs += schedule.runs(i) + 1;
  EXPECT_EQ(norms->calls(), 2 * (runs + 1)) << strategy;
}

void compare_norms() {
  const auto group = RankGroup::join(group_options());
  for (const char* strategy : {"none", "all", "sqrt", "revolve:2"}) {
    compare(group, torch::kDouble, strategy, 11, 1e-11);
    compare(group, torch::kDouble, strategy, 3, 1e-11);
  }
  compare(group, torch::kFloat, "all", 11, 1e-5);
  group->leave();
}

TEST(SyncBatchNorm, MatchesOneProcessOnTwoRanks) {
  expect_all_well(in_ranks({.ranks = 2}, compare_norms));
}

// With a window of three samples, one rank has none.
TEST(SyncBatchNorm, MatchesOneProcessOnFourRanks) {
  expect_all_well(in_ranks({.ranks = 4}, compare_norms));
}

TEST(SyncBatchNorm, FailureReachesAllRanks) {
  expect_all_well(in_ranks({.ranks = 3}, [] {
    const auto group = RankGroup::join(group_options());
    SyncBatchNormGroup norms(group, 8);
    const auto own = torch::full({5}, double(group->rank()), torch::kDouble);
    for (int window = 0; window < 3; ++window) {
      norms.open();
      // Rank 2 fails before its next call. The others see it at their next call, even with
      // another size, or at the end of the window.
      EXPECT_EQ(norms.gather(own)[2][4].item<double>(), 2);
      if (window == 0) {
        norms.close();
        norms.fail();  // no effect: the window is closed
        continue;
      }
      if (group->rank() == 2) {
        norms.fail();
        norms.fail();
        EXPECT_FALSE(norms.failed_elsewhere());
        continue;
      }
      if (window == 1) {
        EXPECT_THROW(norms.gather(own.narrow(0, 0, 2 + group->rank())),
                     c10::Error);
      } else {
        EXPECT_THROW(norms.close(), c10::Error);
      }
      EXPECT_TRUE(norms.failed_elsewhere());
      norms.fail();
    }
    EXPECT_EQ(norms.calls(), 2 + 2 + 2);
    group->leave();
  }));
}

/// One micro-batch per rank and window, so that one process has the same micro-batches.
TrainConfig cnn_config(int64_t ranks) {
  TrainConfig config = config_of(ranks);
  config.model = "cnn-blocks";
  config.model_options = {};
  config.model_options.depth = 2;
  config.model_options.width = 4;
  config.model_options.image_size = 8;
  config.random_samples = 23;  // windows of ten, ten and three
  config.batch = config.accumulate = 0;
  config.global_batch = 10;
  config.accumulate = 1;
  config.steps = 9;
  config.rate.base = 0.01;
  config.optimizer.name =
      "sgd";  // gradients that are zero up to rounding stay so
  config.optimizer.momentum = 0;
  config.recompute = "all";
  config.sync_norm = true;
  config.resolve();
  return config;
}

TEST(SyncBatchNorm, TrainsLikeOneProcess) {
  const Ended alone = child_rank() < 0 ? run(cnn_config(1)) : Ended{};
  for (const int ranks : {2, 4}) {
    const TemporaryDirectory folder;
    const auto ends = in_ranks(ranks_in(folder.path(), ranks), [&] {
      const auto group = RankGroup::join(group_options());
      train(group, {.config = cnn_config(ranks)});
      TrainConfig own = cnn_config(ranks);
      own.sync_norm = false;
      train(group, {.config = own, .name = "own"});
      group->leave();
    });
    if (child_rank() >= 0) continue;
    expect_all_well(ends);
    expect_near(alone, ended(folder.path()), 1e-4);
    const auto wanted = losses(alone.metrics);
    const auto found = losses(ended(folder.path()).metrics);
    const auto apart = losses(ended(folder.path(), "own").metrics);
    ASSERT_EQ(found.size(), 9u);
    for (size_t i = 0; i < 9; ++i) EXPECT_NEAR(found[i], wanted[i], 1e-5);
    EXPECT_GT(std::abs(apart[8] - wanted[8]), 1e-4);
  }
}

// Ranks have six and five samples in micro-batches of two: the last one of the second rank
// has one sample. In a window of three samples, one rank has a second micro-batch and the
// other does not.
TEST(SyncBatchNorm, RestartsWindowOnAllRanks) {
  const std::vector<int64_t> moments = {30, 71, 150, 403, 800, 1300};
  const TemporaryDirectory folder;
  InRanks how{.ranks = 2};
  how.folder = folder.path();
  expect_all_well(in_ranks(how, [&] {
    TrainConfig config = cnn_config(2);
    config.batch = 2;
    config.accumulate = 0;
    config.resolve();
    config.steps = 6;
    const auto group = RankGroup::join(group_options());
    train(group, {.config = config});
    for (const int64_t after : moments) {
      train(group, {.config = config,
                    .name = std::to_string(after),
                    .failing_rank = static_cast<int>(after % 2),
                    .failing_after = after});
    }
    group->leave();
  }));
  if (child_rank() >= 0) return;
  for (const int64_t after : moments) {
    expect_equal(ended(folder.path()),
                 ended(folder.path(), std::to_string(after)));
  }
}

TEST(SyncBatchNorm, RejectsGraphs) {
  const auto ends = in_ranks({.ranks = 2}, [] {
    TrainConfig config = cnn_config(2);
    config.graph = GraphMode::kOn;
    const detail::RecordedInstead instead(
        [] { return std::unique_ptr<detail::Recorded>(); });
    const auto group = RankGroup::join(group_options());
    Trainer trainer(make_inputs(config), config, {.ranks = group});
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.status, 3);
    EXPECT_NE(end.error.find("[--graph] on: with --sync-norm"),
              std::string::npos)
        << end.error;
  }
}

}  // namespace
}  // namespace reprise::testing
