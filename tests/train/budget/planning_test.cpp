#include "compat/cuda.h"
#include "host_store.h"
#include "plans.h"
#include "train/budget/training_costs.h"
#include "train/runs.h"
#include "train/step/train_setup.h"

#include <reprise/recompute/host_memory.h>
#include <reprise/train/planning.h>

#include <filesystem>

namespace reprise {
namespace {

using testing::expect_same;
using testing::OwnCache;
using testing::request_for;
using testing::run;

TrainConfig config_of(const std::string& model) {
  TrainConfig config = testing::small(model);
  config.model_options.dropout = -1;
  config.random_samples = 64;
  config.batch = config.accumulate = 0;
  config.global_batch = 8;
  config.epochs = 0;
  config.steps = 4;
  ModelOptions& m = config.model_options;
  if (model == "gpt2") {
    m.depth = 3;
    m.width = 64;
    m.vocab = 256;
    m.seq = 32;
  } else if (model == "unet") {
    m.width = 8;
    m.image_size = 32;
  } else {
    m.image_size = 56;
  }
  return config;
}

TEST(Planning, KeepsBudgetsAndPredictsPeaks) {
  const OwnCache cache;
  for (const std::string model : {"cnn-basic", "unet", "gpt2", "gpt2 copies"}) {
    const bool copies = model == "gpt2 copies";
    TrainConfig config = config_of(copies ? "gpt2" : model);
    // adamw8bit has its own workspace and state of different types.
    if (model == "gpt2") config.optimizer.name = "adamw8bit";
    if (copies) {
      config.precision = Precision::kBf16;
      config.weight_copies = WeightCopiesMode::kOn;
    }
    config.resolve();
    std::vector<std::pair<int64_t, PlanResult>> plans;
    {
      // Destroyed before the measurements, because its model uses memory.
      TrainingPlanner planner(config);
      const PlanResult least = planner.plan(request_for(config, 1));
      EXPECT_FALSE(least.feasible);
      int64_t most = 0;
      for (const auto& point : least.references) {
        most = std::max(most, point.peak_bytes);
      }
      // If the peak is in the update, all budgets are equal.
      const double range =
          std::max(0.0, double(most) - double(least.smallest_bytes));
      for (const double share : {0.0, 0.3, 0.6, 1.05}) {
        const auto budget =
            least.smallest_bytes + static_cast<int64_t>(share * range);
        plans.emplace_back(budget, planner.plan(request_for(config, budget)));
      }
    }
    for (const auto& [budget, result] : plans) {
      ASSERT_TRUE(result.feasible) << model << " " << budget;
      const PlanMeasurement measured =
          measure_plan(config, result.plan, budget, 2);
      EXPECT_LE(measured.peak_bytes, budget) << model;
      EXPECT_NEAR(double(result.plan.peak_bytes) / double(measured.peak_bytes),
                  1, 0.03)
          << model << " " << budget << "\n"
          << to_text(result);
    }
  }
}

/// Plans include memory other than activations: random states for dropout,
/// statistics for BatchNorm, copies of gradients with other strides for
/// channels last, and on CUDA the small gradients that are accumulated
/// together.
TEST(Planning, TheSmallestPlanKeepsItsBudget) {
  const OwnCache cache;
  PlanningOptions quick;
  quick.quick = true;
  for (const char* model : {"gpt2", "resnet18", "unet"}) {
    TrainConfig config = config_of(model);
    config.optimizer.name = "adafactor";
    config.model_options = {};
    if (config.model == "gpt2") {
      config.model_options = {.depth = 6,
                              .width = 48,
                              .heads = 3,
                              .vocab = 500,
                              .seq = 64,
                              .dropout = 0.1};
      config.global_batch = 48;
    } else if (config.model == "unet") {
      config.model_options = {.depth = 1, .width = 4, .image_size = 16};
      config.layout = ImageLayout::kChannelsLast;
      config.global_batch = 14;
      config.batch = 3;
    } else {
      config.model_options = {.width = 8, .image_size = 32};
    }
    TrainConfig open = config;
    open.resolve();
    PlanRequest request = request_for(open, 1);
    request.micro_batch = config.batch;
    request.margin = 0;  // the prediction must be exact enough
    config.memory_limit = plan_training(open, request, quick).smallest_bytes;
    request.memory = config.memory_limit;
    const PlanResult result = plan_training(open, request, quick);
    ASSERT_TRUE(result.feasible) << model;
    EXPECT_GT(result.plan.schedule.total_runs(), result.plan.schedule.stages());
    const PlanMeasurement measured = measure_plan(open, result.plan, 0, 1);
    EXPECT_LE(measured.peak_bytes, config.memory_limit) << model;
    // Now with the default margin.
    request.margin = PlanRequest{}.margin;
    request.memory = 1;
    config.memory_limit = plan_training(open, request, quick).smallest_bytes;
    const auto ended = run(config);
    EXPECT_LE(ended.result.summary.peak_bytes, config.memory_limit) << model;
    EXPECT_EQ(ended.result.summary.replans, 0) << model;
  }
}

TEST(Planning, OffloadsNoMoreThanTheHostStoreHolds) {
  const OwnCache cache;
  TrainConfig config = config_of("gpt2");
  config.host_memory = "off";  // the test has its own store
  config.batch = 4;
  config.resolve();
  const detail::TrainSetup setup = detail::make_setup(config);
  const auto offered = [&](int64_t limit) {
    const auto store = std::make_shared<testing::CountingStore>(limit);
    detail::TrainSetup parts = setup;
    HostOptions options;
    options.min_bytes = 1;
    parts.model.chain = with_host_variants(parts.model.chain, store, options);
    parts.host = store;
    detail::TrainingCosts costs(parts, {.memory_only = true});
    EXPECT_TRUE(costs.measure(Precision::kFp32, 4));
    int64_t sum = 0;
    const auto& figures =
        costs.profile(Precision::kFp32).sizes.at(0).chain_costs;
    for (const StageCosts& stage : figures.stages) {
      const KeptRunCosts& host = stage.variants.back();
      sum += host.host_bytes;
      // A stage is either offloaded or has the costs of the plain run.
      if (host.host_bytes > 0) {
        EXPECT_LT(host.saved_bytes, stage.saved_bytes);
        EXPECT_GT(host.forward_ms, stage.forward_ms);
      } else {
        EXPECT_EQ(host.saved_bytes, stage.saved_bytes);
        EXPECT_EQ(host.forward_ms, stage.forward_ms);
      }
    }
    EXPECT_EQ(store->counts->alive, 0);
    return sum;
  };
  const int64_t all = offered(int64_t{1} << 40);
  EXPECT_GT(all, 0);
  const int64_t half = offered(all / 2);
  EXPECT_GT(half, 0);
  EXPECT_LE(half, all / 2 * 3 / 4);
}

TEST(Planning, DoesNotChangeTheTraining) {
  const OwnCache cache;
  // Otherwise two runs of one training differ as well.
  for (const char* model : {"cnn-basic", "gpt2"}) {
    TrainConfig planned = config_of(model);
    planned.memory_limit = int64_t{1} << 30;
    const auto a = run(planned);
    ASSERT_GT(a.config.batch, 0);
    EXPECT_EQ(a.config.recompute, "optimal");
    TrainConfig plain = config_of(model);
    plain.batch = a.config.batch;
    const auto b = run(plain);
    expect_same(a, b, model);
  }
}

/// Returns the cached profile for fp32.
CostProfile kept_profile(const OwnCache& cache) {
  for (const auto& file :
       std::filesystem::directory_iterator(cache.profiles())) {
    CostProfile profile = profile_from_json(read_text(file.path()));
    if (profile.precision == Precision::kFp32) return profile;
  }
  return {};
}

TEST(Planning, TimesThePlanItReturns) {
  for (const char* model : {"cnn-basic", "gpt2"}) {
    const OwnCache cache;
    TrainConfig open = config_of(model);
    // Others have profiles of their own.
    open.state = StatePlace::kDevice;
    open.update = UpdateMode::kAfter;
    TrainConfig config = open;
    config.resolve();
    const int64_t least =
        plan_training(config, request_for(open, 1)).smallest_bytes;
    for (const double share : {1.0, 1.3, 3.0}) {
      const auto memory = static_cast<int64_t>(share * double(least));
      const PlanResult result =
          plan_training(config, request_for(open, memory));
      ASSERT_TRUE(result.feasible);
      // The plan is within the budget, so it must have been tried.
      const auto ms = kept_profile(cache).tried_ms(
          result.plan.micro_batch, result.plan.schedule.to_text(),
          result.plan.graph);
      ASSERT_TRUE(ms.has_value()) << model << " " << share;
      EXPECT_EQ(result.plan.micro_ms, *ms);
      EXPECT_GT(*ms, 0);
      // The cached measurements give the same result. On a busy machine the
      // times may be compared once more before.
      std::string last = to_json(result);
      bool settled = false;
      for (int i = 0; i < 4 && !settled; ++i) {
        const auto next =
            to_json(plan_training(config, request_for(open, memory)));
        settled = next == last;
        last = next;
      }
      EXPECT_TRUE(settled) << model << " " << share << last;
    }
  }
}

TEST(Planning, TrialsDoNotChangeTheTraining) {
  // Otherwise two runs of one training differ as well.
  for (const char* model : {"cnn-basic", "gpt2"}) {
    const OwnCache cache;
    TrainConfig config = config_of(model);
    if (config.model == "gpt2") {
      config.model_options.dropout = 0.1;
    } else {
      config.model_options.norm = "batch";
    }
    TrainConfig planned = config;
    config.resolve();
    const int64_t least =
        plan_training(config, request_for(planned, 1)).smallest_bytes;
    const size_t before = kept_profile(cache).tried.size();
    planned.memory_limit = least + least / 20;
    const auto a = run(planned);
    // The trainer must have tried schedules itself.
    EXPECT_GT(kept_profile(cache).tried.size(), before) << model;
    TrainConfig plain = planned;
    plain.memory_limit = 0;
    plain.batch = a.config.batch;
    expect_same(a, run(plain), model);
  }
}

TEST(Planning, RejectsAnInfeasibleBudget) {
  const OwnCache cache;
  TrainConfig config = config_of("gpt2");
  config.memory_limit = 1 << 20;
  config.resolve();
  const auto error =
      testing::error_of([&] { Trainer trainer(make_inputs(config), config); });
  EXPECT_NE(error.find("nothing fits into 1.00 MiB (1048576 bytes); the "
                       "smallest plan needs"),
            std::string::npos)
      << error;
}

TEST(Planning, ConvertsWeightsAtEachUseIfCopiesDoNotFit) {
  if (!testing::device().is_cuda()) {
    GTEST_SKIP() << "copies are left to the plan on CUDA alone";
  }
  const OwnCache cache;
  TrainConfig config = config_of("gpt2");
  config.model_options.width = 256;
  config.precision = Precision::kBf16;
  const auto plan_with = [&](const char* copies, int64_t memory) {
    config.weight_copies = from_text<WeightCopiesMode>(copies);
    return TrainingPlanner(config).plan(request_for(config, memory));
  };
  const int64_t each = plan_with("each", 1).smallest_bytes;
  const int64_t on = plan_with("on", 1).smallest_bytes;
  EXPECT_LT(each, on);
  const PlanResult none = plan_with("auto", 1);
  EXPECT_FALSE(none.feasible);
  EXPECT_LT(none.smallest_bytes, on);
  const int64_t between = (each + on) / 2;
  EXPECT_FALSE(plan_with("on", between).feasible);
  const PlanResult tight = plan_with("auto", between);
  ASSERT_TRUE(tight.feasible);
  EXPECT_EQ(tight.plan.weight_copies, WeightCopiesMode::kEach);
  EXPECT_NE(plan_with("auto", 8 * on).plan.weight_copies,
            WeightCopiesMode::kEach);
  config.memory_limit = between;
  EXPECT_LE(run(config).result.summary.peak_bytes, between);
}

TEST(Planning, CachesMeasurements) {
  const OwnCache cache;
  TrainConfig config = config_of("gpt2");
  config.resolve();
  int measured = 0;
  PlanningOptions options;
  options.progress = [&](const std::string&) { ++measured; };
  std::string last, before;
  const auto plan_again = [&] {
    measured = 0;
    before = last;
    last = to_json(plan_training(config, request_for(config, 0), options));
  };
  plan_again();
  EXPECT_GT(measured, 0);
  // On a busy machine the times may be compared once more.
  for (int i = 0; i < 4 && measured > 0; ++i) plan_again();
  EXPECT_EQ(measured, 0);
  EXPECT_EQ(last, before);
  options.fresh = true;
  plan_training(config, request_for(config, 0), options);
  EXPECT_GT(measured, 0);
  // Another model has another profile.
  measured = 0;
  options.fresh = false;
  config.model_options.depth = 2;
  plan_training(config, request_for(config, 0), options);
  EXPECT_GT(measured, 0);
}

TEST(Planning, IgnoresTheCachedProfileOfAnotherChain) {
  const OwnCache cache;
  TrainConfig config = config_of("gpt2");
  config.resolve();
  plan_training(config, request_for(config, 0));
  for (const auto& file :
       std::filesystem::directory_iterator(cache.profiles())) {
    CostProfile profile = profile_from_json(read_text(file.path()));
    profile.stages[0] = "divided otherwise";
    AtomicFile out(file.path());
    out.write(to_json(profile));
    out.commit();
  }
  int measured = 0;
  PlanningOptions options;
  options.progress = [&](const std::string&) { ++measured; };
  plan_training(config, request_for(config, 0), options);
  EXPECT_GT(measured, 0);
}

TEST(Planning, FindsTheLargestSizeThatFits) {
  const OwnCache cache;
  TrainConfig config = config_of("gpt2");
  // Otherwise a plan without recomputation may have state in host memory.
  config.state = StatePlace::kDevice;
  config.resolve();
  PlanningOptions quick;
  quick.quick = true;
  const int64_t memory = int64_t{testing::device().is_cuda() ? 256 : 10} << 20;
  const Largest batch = find_largest(config, LargestAxis::kBatch,
                                     request_for(config, memory), quick);
  EXPECT_GT(batch.plain, 0);
  EXPECT_GT(batch.value, batch.plain);
  EXPECT_LE(batch.peak_bytes, memory);
  ASSERT_TRUE(batch.plan.has_value());
  EXPECT_EQ(batch.plan->micro_batch, batch.value);
  // The next larger value does not fit.
  std::string found;
  const auto fits = [&](TrainConfig one, PlanRequest request, bool plain) {
    if (plain) request.strategy = "none";
    PlanningOptions anything = quick;
    anything.fresh = true;  // the search does not use the cache either
    const PlanResult result = TrainingPlanner(one, anything).plan(request);
    found = to_text(result);
    return result.feasible;
  };
  for (const bool plain : {true, false}) {
    PlanRequest request = request_for(config, memory);
    for (const int64_t more : {0, 1}) {
      request.global_batch = request.micro_batch =
          (plain ? batch.plain : batch.value) + more;
      EXPECT_EQ(fits(config, request, plain), more == 0)
          << plain << " " << request.micro_batch << "\n"
          << to_text(batch) << found;
    }
  }
  const Largest seq = find_largest(config, LargestAxis::kSeq,
                                   request_for(config, memory), quick);
  EXPECT_GE(seq.value, seq.plain);
  for (const int64_t more : {0, 1}) {
    TrainConfig longer = config;
    longer.model_options.seq = seq.value + more;
    longer.resolve();
    EXPECT_EQ(fits(longer, request_for(longer, memory), false), more == 0)
        << longer.model_options.seq << "\n"
        << to_text(seq) << found;
  }
  // cnn-basic accepts only sizes that are doubled.
  TrainConfig cnn = config_of("cnn-basic");
  cnn.resolve();
  const Largest side = find_largest(cnn, LargestAxis::kImageSize,
                                    request_for(cnn, memory), quick);
  EXPECT_GE(side.plain, 28);
  EXPECT_GE(side.value, side.plain);
  EXPECT_LE(side.peak_bytes, memory);
  EXPECT_THROW(
      find_largest(config, LargestAxis::kBatch, request_for(config, 0)),
      c10::Error);
}

}  // namespace
}  // namespace reprise
