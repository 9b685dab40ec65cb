// Tests of replanning when the peak exceeds the budget or memory runs out.
#include "train/runs.h"

#include <reprise/recompute/strategy.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <deque>
#include <sstream>
#include <utility>

namespace reprise {
namespace {

using testing::device;
using testing::Ended;
using testing::error_of;
using testing::expect_same;
using testing::relative_error;
using testing::run;
using testing::small;

struct Planned {
  int64_t micro_batch;
  std::string strategy;
};

/// Calls of a planner.
struct Asked {
  int decided = 0;
  std::vector<int64_t> over_bytes;
  std::vector<std::string> present;
};

/// Returns plans from a list. Changes the state that measurements would
/// change.
class Scripted : public BudgetPlanner {
 public:
  Scripted(std::deque<Planned> list, const TrainConfig& config, Asked& asked)
      : list_(std::move(list)), config_(config), asked_(asked) {
    stages_ = make_model(config.model, config.model_options).chain.size();
  }

  Plan decide() override {
    ++asked_.decided;
    return *take();
  }

  std::optional<Plan> tighten(const Plan& present,
                              int64_t over_bytes) override {
    asked_.present.push_back(present.schedule.name());
    asked_.over_bytes.push_back(over_bytes);
    return take();
  }

 private:
  std::optional<Plan> take() {
    torch::rand(7);
    if (list_.empty()) return std::nullopt;
    const Planned next = list_.front();
    list_.pop_front();
    const int64_t size = next.micro_batch;
    return Plan{.micro_batch = size,
                .accumulate = (config_.global_batch + size - 1) / size,
                .schedule = make_schedule(next.strategy, stages_),
                .peak_bytes = 12345,
                .step_ms = 6.5,
                .graph = true};
  }

  std::deque<Planned> list_;
  const TrainConfig config_;
  Asked& asked_;
  int stages_ = 0;
};

struct PlannedWarnings : testing::Warnings {
  void started(const Start& start) override { how = start.how; }
  std::string how;
};

struct PlannedRun {
  Ended ended;
  Asked asked;
  PlannedWarnings warnings;
};

PlannedRun run_planned(TrainConfig config, const std::deque<Planned>& list,
                       const std::vector<int>& stops = {},
                       const testing::Failing& failing = {}) {
  config.resolve();
  PlannedRun result;
  result.ended = run(config, stops, &result.warnings, failing, [&] {
    return std::make_unique<Scripted>(list, config, result.asked);
  });
  return result;
}

TrainConfig batch_norm() {
  auto config = small("cnn-basic");
  config.model_options.norm = "batch";
  return config;
}

/// Returns a configuration with windows of eight samples and a budget of
/// `memory` bytes, which leaves the micro-batch to the planner.
TrainConfig open_size(int64_t memory) {
  auto config = small();
  config.batch = 0;
  config.accumulate = 0;
  config.global_batch = 8;
  config.memory_limit = memory;
  return config;
}

constexpr int64_t kMuch = int64_t{1} << 50;

TEST(Budget, KeepsTheFirstPlanIfItFits) {
  auto config = batch_norm();
  const Ended plain = run(config);
  config.memory_limit = kMuch;
  const PlannedRun planned = run_planned(config, {{4, "sqrt"}, {4, "all"}});
  expect_same(planned.ended, plain, "planned");
  EXPECT_EQ(planned.asked.decided, 1);
  EXPECT_TRUE(planned.asked.over_bytes.empty());
  EXPECT_TRUE(planned.warnings.list.empty());
  EXPECT_NE(planned.warnings.how.find("; plan: micro-batch 4 × "),
            std::string::npos);
  const TrainSummary& s = planned.ended.result.summary;
  EXPECT_EQ(s.recompute, "sqrt");
  EXPECT_EQ(s.replans, 0);
  ASSERT_TRUE(s.predicted.has_value());
  EXPECT_EQ(*s.predicted, (TrainSummary::Predicted{12345, 6.5}));
  EXPECT_FALSE(plain.result.summary.predicted.has_value());
}

TEST(Budget, ReplansWithoutChangingResultsIfExceeded) {
  // One model has buffers, the other dropout.
  for (TrainConfig config : {batch_norm(), small()}) {
    const Ended plain = run(config);
    config.memory_limit = 1;
    const PlannedRun planned =
        run_planned(config, {{4, "none"}, {4, "every:2"}, {4, "all"}});
    expect_same(planned.ended, plain, "planned again");
    EXPECT_EQ(planned.asked.present,
              (std::vector<std::string>{"none", "every:2", "all"}));
    for (const int64_t over : planned.asked.over_bytes) EXPECT_GT(over, 1000);
    const PlannedWarnings& warnings = planned.warnings;
    EXPECT_EQ(warnings.list.size(), 3u);
    EXPECT_EQ(warnings.count("the budget is 1 B; from now on micro-batch"), 2);
    EXPECT_EQ(warnings.count("nothing smaller is left"), 1);
    EXPECT_EQ(planned.ended.result.summary.replans, 2);
    EXPECT_EQ(planned.ended.result.summary.recompute, "all");
    EXPECT_GT(planned.ended.result.summary.kept_bytes, 0);
  }
}

TEST(Budget, ReplansWithoutChangingResultsAfterAFailedAllocation) {
  if (!device().is_cpu()) GTEST_SKIP() << "failures are injected on the CPU";
  auto config = batch_norm();
  config.workers = 0;
  const Ended plain = run(config);
  config.memory_limit = kMuch;
  for (const int64_t after : {30, 200, 400}) {
    const PlannedRun planned =
        run_planned(config, {{4, "none"}, {4, "all"}}, {}, {.after = after});
    expect_same(planned.ended, plain, "failed");
    EXPECT_EQ(planned.asked.over_bytes, std::vector<int64_t>{0});
    EXPECT_EQ(planned.ended.result.summary.recompute, "all");
    // Without a smaller plan, the window is repeated with the same one.
    const PlannedRun same_plan =
        run_planned(config, {{4, "sqrt"}}, {}, {.after = after});
    expect_same(same_plan.ended, plain, "failed, no other plan");
    EXPECT_EQ(same_plan.ended.result.summary.replans, 0);
  }
}

TEST(Budget, ChoosesTheMicroBatchAndSavesItForResume) {
  auto given = open_size(0);
  given.batch = 3;  // 3, 3, 2
  const Ended plain = run(given);
  auto config = open_size(kMuch);
  const PlannedRun planned = run_planned(config, {{3, "sqrt"}});
  expect_same(planned.ended, plain, "chosen");
  EXPECT_EQ(planned.ended.config.recompute, "optimal");
  EXPECT_EQ(planned.ended.config.memory_limit, kMuch);
  EXPECT_EQ(planned.ended.config.batch, 3);
  EXPECT_EQ(planned.ended.config.accumulate, 3);
  EXPECT_EQ(planned.ended.result.summary.micro_batch, 3);
  expect_same(run_planned(config, {{3, "sqrt"}}, {4, 3}).ended, plain,
              "stopped");
}

TEST(Budget, ContinuesAtTheSameSampleWithASmallerMicroBatch) {
  auto given = open_size(0);
  given.batch = 8;
  given.model_options.dropout = 0;
  given.optimizer.name = "sgd";
  const Ended full = run(given);
  auto config = given;
  config.batch = 0;
  config.memory_limit = 1;
  const PlannedRun planned =
      run_planned(config, {{8, "none"}, {3, "none"}, {2, "all"}});
  EXPECT_EQ(planned.ended.config.batch, 2);
  EXPECT_EQ(planned.ended.config.accumulate, 4);
  for (size_t i = 0; i < full.tensors.size(); ++i) {
    if (!full.tensors[i].first.starts_with("parameter.")) continue;
    EXPECT_LT(
        relative_error(full.tensors[i].second, planned.ended.tensors[i].second),
        1e-5)
        << full.tensors[i].first;
  }
  std::istringstream lines(planned.ended.metrics);
  std::string line;
  std::vector<int64_t> samples;
  while (std::getline(lines, line)) {
    samples.push_back(nlohmann::json::parse(line).at("samples"));
  }
  EXPECT_EQ(samples, (std::vector<int64_t>{8, 8, 6, 8, 8, 6}));
}

/// Also tests a window that was resumed from disk.
TEST(Budget, ReducesTheMicroBatchAfterAFailedAllocation) {
  if (!device().is_cpu()) GTEST_SKIP() << "failures are injected on the CPU";
  auto config = open_size(kMuch);
  config.model_options.dropout = 0;
  config.workers = 0;
  config.optimizer.name = "sgd";
  const Ended full = run_planned(config, {{4, "none"}}).ended;
  for (const std::vector<int>& stops : {std::vector<int>{}, {3}}) {
    const PlannedRun planned =
        run_planned(config, {{4, "none"}, {3, "none"}}, stops,
                    {.part = stops.size(), .after = 60});
    EXPECT_EQ(planned.ended.config.batch, 3);
    for (size_t i = 0; i < full.tensors.size(); ++i) {
      if (!full.tensors[i].first.starts_with("parameter.")) continue;
      EXPECT_LT(relative_error(full.tensors[i].second,
                               planned.ended.tensors[i].second),
                1e-5)
          << full.tensors[i].first;
    }
  }
}

TEST(Budget, ThrowsIfNothingFits) {
  class Impossible : public BudgetPlanner {
    Plan decide() override {
      TORCH_CHECK(false, "[plan] expected at least 5 GiB");
    }
    std::optional<Plan> tighten(const Plan&, int64_t) override {
      return std::nullopt;
    }
  };
  auto config = open_size(1);
  config.resolve();
  EXPECT_NE(error_of([&] {
              Trainer(make_inputs(config), config,
                      {.planner = std::make_unique<Impossible>()});
            }).find("at least 5 GiB"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
