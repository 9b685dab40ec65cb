// Trainings whose optimizer keeps its state in host memory. The truth are trainings with the
// state on the device.
#include "train/step/host_state_runs.h"

#include <reprise/recompute/strategy.h>
#include <reprise/train/planning.h>

#include <torch/optim/sgd.h>

#include <optional>

namespace reprise {
namespace {

using testing::device;
using testing::Ended;
using testing::error_of;
using testing::expect_same;
using testing::Host;
using testing::run_in;
using testing::small;
using testing::Warnings;

TrainConfig one_micro_batch(TrainConfig config) {
  config.batch = 8;
  config.accumulate = 1;
  config.clip = 0;
  config.update = UpdateMode::kBackward;
  return config;
}

std::vector<TrainConfig> models() {
  auto half = testing::tokens();
  half.precision = Precision::kBf16;
  half.weight_copies = WeightCopiesMode::kOn;
  auto adapted = testing::tokens();
  adapted.lora.rank = 2;
  return {small(), testing::images(), testing::tokens(), half, adapted};
}

TEST(HostStateTraining, DoesNotChangeResults) {
  const Host host;
  for (const TrainConfig& config : models()) {
    const Ended streamed = run_in(config, StatePlace::kHost);
    const Ended resident = run_in(config, StatePlace::kDevice);
    expect_same(streamed, resident, config.model);
    EXPECT_GT(streamed.result.summary.host_state_bytes, 0);
    EXPECT_EQ(resident.result.summary.host_state_bytes, 0);
  }
  for (const std::string& name : optimizer_names()) {
    auto config = testing::tokens();
    config.optimizer.name = name;
    expect_same(run_in(config, StatePlace::kHost),
                run_in(config, StatePlace::kDevice), name);
  }
}

TEST(HostStateTraining, DoesNotChangeUpdatesInTheBackward) {
  const Host host;
  for (TrainConfig config : models()) {
    config = one_micro_batch(config);
    config.graph = GraphMode::kAuto;
    std::optional<detail::RecordedInstead> instead;
    if (device().is_cpu()) instead.emplace(testing::repeated());
    const Ended streamed = run_in(config, StatePlace::kHost);
    expect_same(streamed, run_in(config, StatePlace::kDevice), config.model);
    EXPECT_EQ(streamed.result.summary.graph.rfind("off: with --update", 0), 0u)
        << streamed.result.summary.graph;
    EXPECT_NE(streamed.result.summary.graph.find("--state host"),
              std::string::npos);
    EXPECT_EQ(streamed.result.summary.graph_replays, 0);
  }
}

TEST(HostStateTraining, ContinuesResumedRuns) {
  const Host host;
  for (auto config : {testing::images(), one_micro_batch(testing::tokens())}) {
    config.save_every = 1;
    const Ended plain = run_in(config, StatePlace::kDevice);
    expect_same(run_in(config, StatePlace::kHost, {1, 2, 1}), plain,
                config.model + ", three stops");
  }
}

/// The place is not part of a saved state.
TEST(HostStateTraining, ResumesInAnotherPlace) {
  const Host host;
  auto config = testing::tokens();
  config.resolve();
  const Ended plain = run_in(config, StatePlace::kDevice);
  const testing::TemporaryDirectory base;
  const std::string path = base.path() + "/run";
  int part = 0;
  for (const StatePlace place :
       {StatePlace::kHost, StatePlace::kDevice, StatePlace::kHost}) {
    config.state = place;
    auto directory = part == 0 ? RunDirectory::create(path, to_json(config))
                               : RunDirectory::open(path);
    int left = part == 2 ? -1 : 2;
    TrainRun how;
    how.directory = &directory;
    how.resume = part > 0;
    how.stop = [&left] { return left-- == 0; };
    Trainer(make_inputs(config), config).run(how);
    ++part;
  }
  const auto state = detail::newest_state(RunDirectory::open(path),
                                          [](const auto&) { FAIL(); });
  ASSERT_EQ(state->tensors.size(), plain.tensors.size());
  for (size_t i = 0; i < plain.tensors.size(); ++i) {
    EXPECT_TRUE(
        testing::same(state->tensors[i].second, plain.tensors[i].second))
        << plain.tensors[i].first;
  }
}

TEST(HostStateTraining, RepeatsWindowsAfterFailedAllocations) {
  if (device().is_cuda()) GTEST_SKIP() << "failures are injected on the CPU";
  const Host host;
  auto config = testing::images();
  config.workers = 0;
  config.epochs = 1;
  const Ended plain = run_in(config, StatePlace::kDevice);
  const int64_t all =
      run_in(config, StatePlace::kHost, {}, nullptr, {0}).allocations;
  for (int i = 0; i < 12; ++i) {
    Warnings warnings;
    expect_same(
        run_in(config, StatePlace::kHost, {}, &warnings, {0, all * i / 12}),
        plain, "failure " + std::to_string(i));
  }
}

TEST(HostStateTraining, StaysOnTheDeviceIfTheHostHasNoRoom) {
  if (device().is_cuda()) GTEST_SKIP() << "there is room";
  const Host host(/*limit=*/100);
  Warnings warnings;
  const auto config = testing::tokens();
  const Ended got = run_in(config, StatePlace::kHost, {}, &warnings);
  expect_same(got, run_in(config, StatePlace::kDevice), "without room");
  EXPECT_EQ(warnings.count("state stays on the device"), 1);
  EXPECT_EQ(got.result.summary.host_state_bytes, 0);
}

TEST(HostStateTraining, TakesNoDeviceMemory) {
  const Host host(/*limit=*/int64_t{1} << 30, /*chunk=*/64 << 10);
  auto config = small();
  config.model_options.depth = 12;
  config.model_options.width = 256;
  config.random_samples = 6;
  config.batch = 2;
  config.accumulate = 1;
  config.workers = 0;
  const auto streamed = run_in(config, StatePlace::kHost).result.summary;
  const auto resident = run_in(config, StatePlace::kDevice).result.summary;
  const int64_t state = 8 * streamed.parameters;
  EXPECT_GE(streamed.host_state_bytes, state);
  EXPECT_EQ(streamed.memory[Category::kOptimizer], 0);
  EXPECT_GE(resident.memory[Category::kOptimizer], state);
  if (device().is_cpu()) {
    EXPECT_LE(streamed.peak_bytes, resident.peak_bytes - state + (256 << 10));
  }
}

/// A plan with a part of the optimizer's state in host memory.
class PartOnHost final : public BudgetPlanner {
 public:
  PartOnHost(TrainConfig config, double share)
      : config_(std::move(config)), share_(share) {}
  Plan decide() override {
    const int stages =
        make_model(config_.model, config_.model_options).chain.size();
    return {.micro_batch = config_.batch,
            .accumulate = config_.accumulate,
            .schedule = make_schedule("all", stages),
            .peak_bytes = 1,
            .step_ms = 1,
            .state = StatePlace::kHost,
            .host_share = share_};
  }
  std::optional<Plan> tighten(const Plan&, int64_t) override { return {}; }

 private:
  TrainConfig config_;
  double share_;
};

TEST(HostStateTraining, APartStaysOnTheDevice) {
  const Host host;
  auto config = testing::tokens();
  config.memory_limit = int64_t{1} << 40;
  config.save_every = 1;
  config.resolve();
  const auto with_share = [&](double share, std::vector<int> stops) {
    return testing::run(config, stops, nullptr, {}, [&] {
      return std::make_unique<PartOnHost>(config, share);
    });
  };
  auto resident = config;
  resident.memory_limit = 0;
  resident.recompute = "all";
  const Ended plain = run_in(resident, StatePlace::kDevice);
  const Ended all = with_share(1, {});
  const Ended part = with_share(0.5, {});
  expect_same(all, plain, "all of the state");
  expect_same(part, plain, "a part of the state");
  expect_same(with_share(0.5, {1, 2}), plain, "a part, resumed");
  const auto bytes = [](const Ended& ended) {
    return static_cast<double>(ended.result.summary.host_state_bytes);
  };
  EXPECT_NEAR(bytes(part) / bytes(all), 0.5, 0.2);
}

TEST(HostStateTraining, IsRefusedWithAReason) {
  auto config = small();
  config.state = StatePlace::kHost;
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_EQ(text.rfind("[--state] host", 0), 0u) << text;
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_NE(text.find("use --state device"), std::string::npos) << text;
  };
  if (device().is_cpu()) {
    expect(error_of([&] { TrainConfig(config).resolve(); }),
           "the device is the CPU");
  }
  const Host host;
  auto off = config;
  off.host_memory = "off";
  expect(error_of([&] { off.resolve(); }), "--host-memory off");
  auto sharded = config;
  sharded.ranks = 2;
  sharded.shard = Sharding::kOptimizer;
  sharded.state = StatePlace::kHostAll;
  expect(error_of([&] { sharded.resolve(); }), "--shard");
  config.resolve();
  TrainInputs inputs = make_inputs(config);
  inputs.optimizer = [](const NamedTensors& parameters) {
    std::vector<torch::Tensor> list;
    for (const auto& item : parameters) list.push_back(item.second);
    return wrap_optimizer(std::make_unique<torch::optim::SGD>(list, 0.1),
                          parameters);
  };
  expect(error_of([&] { Trainer(inputs, config); }), "make_optimizer()");
}

}  // namespace
}  // namespace reprise
