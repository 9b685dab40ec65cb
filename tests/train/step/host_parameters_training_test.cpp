// Trainings with parameters, gradients and optimizer state in host memory. The truth are
// trainings with all of it on the device.
#include "train/step/failing_updates.h"
#include "train/step/host_state_runs.h"

#include <reprise/train/planning.h>

#include <optional>

namespace reprise {
namespace {

using testing::device;
using testing::Ended;
using testing::error_of;
using testing::expect_same;
using testing::fail_all_over;
using testing::heavy;
using testing::Host;
using testing::run_in;
using testing::small;

TrainConfig unclipped(TrainConfig config) {
  config.clip = 0;
  return config;
}

std::vector<TrainConfig> moved_models() {
  auto half = testing::tokens();
  half.precision = Precision::kBf16;
  half.weight_copies = WeightCopiesMode::kEach;
  auto adapted = testing::tokens();
  adapted.lora.rank = 2;
  std::vector<TrainConfig> list = {small(), testing::images(),
                                   testing::tokens(), half, adapted};
  for (TrainConfig& config : list) config.clip = 0;
  return list;
}

TEST(HostParametersTraining, DoesNotChangeResults) {
  const Host host;
  for (TrainConfig config : moved_models()) {
    for (const char* strategy : {"none", "all"}) {
      config.recompute = strategy;
      const Ended streamed = run_in(config, StatePlace::kHostAll);
      const Ended resident = run_in(config, StatePlace::kDevice);
      expect_same(streamed, resident, config.model + " " + strategy);
      EXPECT_GT(streamed.result.summary.host_state_bytes, 0);
    }
  }
  for (const std::string& name : optimizer_names()) {
    auto config = unclipped(testing::tokens());
    config.optimizer.name = name;
    expect_same(run_in(config, StatePlace::kHostAll),
                run_in(config, StatePlace::kDevice), name);
  }
}

TEST(HostParametersTraining, ContinuesResumedRuns) {
  const Host host;
  for (auto config :
       {unclipped(testing::images()), unclipped(testing::tokens())}) {
    config.save_every = 1;
    const Ended plain = run_in(config, StatePlace::kDevice);
    expect_same(run_in(config, StatePlace::kHostAll, {1, 2, 1}), plain,
                config.model + ", three stops");
  }
}

TEST(HostParametersTraining, ContinuesIfMemoryRunsOut) {
  if (!device().is_cpu()) GTEST_SKIP() << "injects CPU allocation failures";
  const Host host;
  for (const TrainConfig& model : moved_models()) {
    // Otherwise the gradients between its stages are too large to be held.
    const bool continues = model.model != "cnn-basic" && model.lora.rank == 0;
    TrainConfig config = continues ? heavy(model) : model;
    const Ended plain = run_in(config, StatePlace::kDevice);
    config.state = StatePlace::kHostAll;
    const std::string what = config.model + " " + to_text(config.precision) +
                             (config.lora.rank > 0 ? ", adapters" : "");
    const auto outcome = fail_all_over(config, plain, what, 24);
    if (!continues) continue;
    EXPECT_GT(outcome.continued, 0) << what;
    // Copies of the tied weight are added to in place.
    if (config.precision == Precision::kFp32) {
      EXPECT_EQ(outcome.ended, 0) << what;
    }
  }
}

TEST(HostParametersTraining, StateIsOfTheSameSizeEverywhere) {
  const Host host;
  auto config = unclipped(testing::tokens());
  config.recompute = "all";
  const auto streamed = run_in(config, StatePlace::kHostAll).result.summary;
  const auto on_host = run_in(config, StatePlace::kHost).result.summary;
  const auto resident = run_in(config, StatePlace::kDevice).result.summary;
  EXPECT_GT(streamed.host_state_bytes, on_host.host_state_bytes);
  EXPECT_LT(streamed.peak_bytes, resident.peak_bytes);
}

TEST(HostParametersTraining, RefusesWhatItCannotDo) {
  const Host host;
  const auto refusal = [](const std::function<void(TrainConfig&)>& change) {
    auto config = unclipped(testing::tokens());
    config.state = StatePlace::kHostAll;
    change(config);
    return error_of([&] { config.resolve(); });
  };
  EXPECT_NE(refusal([](auto& c) { c.clip = 1; }).find("--clip"),
            std::string::npos);
  EXPECT_NE(refusal([](auto& c) {
              c.update = UpdateMode::kAfter;
            }).find("--update after"),
            std::string::npos);
  EXPECT_NE(refusal([](auto& c) {
              c.weight_copies = WeightCopiesMode::kSplit;
            }).find("--weight-copies split"),
            std::string::npos);
  auto allowed = unclipped(testing::tokens());
  allowed.state = StatePlace::kHostAll;
  allowed.resolve();
}

TEST(HostParametersTraining, EndsWithoutRoom) {
  if (!device().is_cpu()) GTEST_SKIP() << "limits the test's host memory";
  const Host host(/*limit=*/1024);
  const std::string error = error_of(
      [] { run_in(unclipped(testing::tokens()), StatePlace::kHostAll); });
  EXPECT_NE(error.find("[--state] host-all: the host gives no memory"),
            std::string::npos)
      << error;
}

}  // namespace
}  // namespace reprise
