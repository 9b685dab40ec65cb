#include "compat/cuda.h"
#include "train/step/graph_runs.h"

#include <reprise/train/profile.h>
#include <reprise/train/trainer.h>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <optional>
#include <vector>

namespace reprise {
namespace {

using detail::RecordedInstead;
using testing::device;
using testing::error_of;
using testing::Repeated;
using testing::repeated;

TrainConfig profiled(const std::string& recompute = "none") {
  TrainConfig config;
  config.model = "mlp";
  config.model_options.depth = 4;
  config.model_options.width = 64;
  config.device = device().str();
  config.data = "random";
  config.random_samples = 22;
  config.batch = 4;
  config.accumulate = 2;
  config.steps = 2;
  config.workers = 0;
  config.evaluate = false;
  config.recompute = recompute;
  config.resolve();
  return config;
}

TEST(Profile, PhasesHaveNoGaps) {
  for (const int64_t accumulate : {1, 2}) {
    TrainConfig config = profiled("sqrt");
    config.accumulate = accumulate;
    config.global_batch = config.batch * accumulate;
    const auto phases = profile_training(config).phases;
    std::vector<std::string> names;
    int64_t sum = 0;
    for (size_t i = 0; i < phases.size(); ++i) {
      names.push_back(phases[i].name);
      sum += phases[i].increment_bytes();
      EXPECT_GE(phases[i].peak_bytes,
                std::max(phases[i].before_bytes, phases[i].after_bytes));
      EXPECT_GE(phases[i].ms, 0);
      if (i > 0) {
        EXPECT_EQ(phases[i].before_bytes, phases[i - 1].after_bytes)
            << phases[i].name;
      }
    }
    EXPECT_EQ(sum, phases.back().after_bytes - phases.front().before_bytes);
    std::vector<std::string> expected{"model",    "data",    "optimizer state",
                                      "batch",    "forward", "last stage",
                                      "backward", "update"};
    if (accumulate > 1) {
      expected.insert(expected.end() - 1, "other micro-batches");
    }
    EXPECT_EQ(names, expected);
  }
}

TEST(Profile, PhasesContainTheirMemory) {
  const TrainConfig config = profiled();
  const TrainingProfile profile = profile_training(config);
  const auto increment = [&](const std::string& name) {
    const auto found =
        std::find_if(profile.phases.begin(), profile.phases.end(),
                     [&](const auto& phase) { return phase.name == name; });
    return found->increment_bytes();
  };
  const Model model = make_model(config.model, config.model_options);
  const int64_t parameters = storage_bytes(model.root->parameters());
  if (device().is_cpu()) {  // the CUDA allocator rounds up
    EXPECT_EQ(increment("model"), parameters);
    // AdamW has two moments per parameter.
    EXPECT_NEAR(static_cast<double>(increment("optimizer state")),
                2.0 * static_cast<double>(parameters), 256);
  }
  // The update frees the gradients and the batch.
  EXPECT_LE(increment("update"), -parameters);
}

TEST(Profile, KeptBytesEqualThoseOfTheTraining) {
  for (const char* recompute : {"none", "all", "sqrt"}) {
    const TrainConfig config = profiled(recompute);
    const TrainingProfile profile = profile_training(config);
    const TrainSummary summary =
        Trainer(make_inputs(config), config).run().summary;
    EXPECT_EQ(profile.kept_bytes, summary.kept_bytes) << recompute;
    int64_t by_stage = 0;
    for (const auto& stage : profile.stages) by_stage += stage.kept_bytes;
    EXPECT_EQ(by_stage, profile.kept_bytes) << recompute;
    if (device().is_cuda()) continue;
    // A training also holds its loss, and the state of a random generator to
    // repeat a window.
    const int64_t more = summary.window_peak_bytes - profile.peak_bytes;
    EXPECT_GE(more, 0) << recompute;
    EXPECT_LT(more, 8192) << recompute;
    EXPECT_EQ(profile.peak_phase, summary.peak_phase);
    EXPECT_EQ(profile.peak_stage, summary.peak_stage);
  }
}

TEST(Profile, PeakEqualsTheHighestPhasePeak) {
  const TrainingProfile profile = profile_training(profiled("all"));
  int64_t highest = 0;
  bool window = false;
  for (const auto& phase : profile.phases) {
    window |= phase.name == "batch";
    if (window) highest = std::max(highest, phase.peak_bytes);
  }
  EXPECT_EQ(profile.peak_bytes, highest);
  int64_t sum = 0;
  for (const int64_t bytes : profile.memory.bytes) sum += bytes;
  EXPECT_EQ(sum, profile.peak_bytes);
}

TEST(Profile, StagesHaveMeasuredCosts) {
  const TrainingProfile profile = profile_training(profiled());
  ASSERT_FALSE(profile.stages.empty());
  // The output of a hidden layer has 4 samples of 64 floats.
  EXPECT_EQ(profile.stages[1].output_bytes % (4 * 64 * 4), 0);
  EXPECT_GT(profile.stages[1].output_bytes, 0);
  for (const auto& stage : profile.stages) {
    EXPECT_GT(stage.forward_ms, 0) << stage.name;
    EXPECT_GT(stage.backward_ms, 0) << stage.name;
  }
}

TEST(Profile, StepTakesAsLongAsInATraining) {
  TrainConfig config = profiled();
  config.random_samples = 256;
  config.accumulate = 16;  // so that a micro-batch takes much less
  config.global_batch = 64;
  // Threads that wait for each other would take any time on a busy machine.
  const int threads = at::get_num_threads();
  config.threads = 1;
  const TrainingProfile profile = profile_training(config);
  EXPECT_EQ(profile.graph, device().is_cuda() ? "on" : "off");

  // Time the windows of a training from outside: `stop` is called before each
  // micro-batch.
  using Clock = std::chrono::steady_clock;
  std::vector<double> window_ms;
  std::optional<Clock::time_point> start;
  int64_t calls = 0;
  config.steps = 30;
  TrainRun how;
  how.stop = [&] {
    if (calls++ % config.accumulate != 0) return false;
    compat::synchronize(device());
    const auto now = Clock::now();
    if (start) {
      window_ms.push_back(
          std::chrono::duration<double, std::milli>(now - *start).count());
    }
    start = now;
    return false;
  };
  Trainer(make_inputs(config), config).run(how);
  at::set_num_threads(threads);
  ASSERT_EQ(window_ms.size(), 29u);
  std::sort(window_ms.begin(), window_ms.end());
  const double ms = window_ms[14];
  // Wide, because machines are noisy.
  EXPECT_GT(profile.step_ms, ms / 8);
  EXPECT_LT(profile.step_ms, ms * 8);
  EXPECT_GT(profile.phases_ms(), profile.step_ms / 8);
}

/// Counts what happens to CUDA graphs, or to their stand-ins.
struct GraphCounts {
  int made = 0, replays = 0, alive = 0;
  int64_t live_bytes = 0;  ///< when the first one was made
};

class CountedGraph final : public detail::Recorded {
 public:
  explicit CountedGraph(GraphCounts& counts) : counts_(counts) {
    if (counts_.made++ == 0) counts_.live_bytes = live_bytes(device());
    ++counts_.alive;
  }
  ~CountedGraph() override { --counts_.alive; }
  void capture(const std::function<void()>& body) override {
    graph_.capture(body);
  }
  void replay() override {
    ++counts_.replays;
    graph_.replay();
  }
  int64_t bytes() const override { return int64_t{1} << 40; }

 private:
  GraphCounts& counts_;
  Repeated graph_;
};

TEST(Profile, StepRunsWithAGraphAndPhasesWithout) {
  TrainConfig config = profiled();
  config.graph = GraphMode::kOff;
  const TrainingProfile plain = profile_training(config);
  EXPECT_EQ(plain.graph, "off");
  EXPECT_GT(plain.step_ms, 0);

  GraphCounts counts;
  TrainingProfile profile;
  {
    const RecordedInstead instead(
        [&] { return std::make_unique<CountedGraph>(counts); });
    config.graph = GraphMode::kAuto;
    profile = profile_training(config);
  }
  EXPECT_EQ(profile.graph, "on");
  EXPECT_GT(profile.step_ms, 0);
  EXPECT_GE(counts.made, 1);
  EXPECT_EQ(counts.alive, 0);
  // At least three windows of two micro-batches.
  EXPECT_GE(counts.replays, 6);
  // The other figures do not contain the memory of the graph.
  ASSERT_EQ(profile.phases.size(), plain.phases.size());
  for (size_t i = 0; i < plain.phases.size(); ++i) {
    const auto &with = profile.phases[i], &without = plain.phases[i];
    EXPECT_EQ(with.name, without.name);
    if (device().is_cuda()) continue;  // workspaces exist from the first on
    EXPECT_EQ(with.increment_bytes(), without.increment_bytes()) << with.name;
    EXPECT_EQ(with.peak_bytes - with.before_bytes,
              without.peak_bytes - without.before_bytes)
        << with.name;
  }
  EXPECT_EQ(profile.kept_bytes, plain.kept_bytes);
  EXPECT_LT(profile.peak_bytes, int64_t{1} << 40);
  if (device().is_cuda()) return;
  // The phases' optimizer state was freed before the training began.
  EXPECT_LT(counts.live_bytes, profile.peak_bytes + 8192);
}

TEST(Profile, SaysWhyTheStepHasNoGraph) {
  int fails = 1;
  const RecordedInstead instead(repeated(&fails));
  const TrainingProfile profile = profile_training(profiled());
  EXPECT_EQ(profile.graph, "off: cannot be captured");
  EXPECT_GT(profile.step_ms, 0);
}

TEST(Profile, RequiresACudaDeviceIfTheGraphIsOn) {
  TrainConfig config = profiled();
  config.device = "cpu";
  config.graph = GraphMode::kOn;
  EXPECT_NE(error_of([&] {
              profile_training(config);
            }).find("[--graph] on needs a CUDA device"),
            std::string::npos);
}

TEST(Profile, FormatsTextAndJson) {
  TrainingProfile profile;
  profile.model = "mlp";
  profile.recompute = "all";
  profile.phases = {{"model", 0, 1 << 20, 2 << 20, 1.5},
                    {"data", 1 << 20, 1 << 20, 1 << 20, 7},
                    {"optimizer state", 1 << 20, 1 << 20, 1 << 20, 9},
                    {"batch", 1 << 20, 1 << 20, 1 << 20, 30},
                    {"update", 1 << 20, 0, 1 << 20, 250}};
  profile.step_ms = 120;
  profile.graph = "on";
  profile.stages = {{"in", 1024, 2048, 512, 256, 1, 2},
                    {"out", 1024, 0, 256, 4096, 2, 4}};
  profile.peak_phase = "backward";
  profile.peak_stage = "out";
  const std::string text = to_text(profile);
  EXPECT_NE(
      text.find("model                          0 B    +1.00 MiB    1.00 MiB "
                "   2.00 MiB     1.50 ms\n"),
      std::string::npos)
      << text;
  EXPECT_NE(text.find("      together                   2.00 KiB   2.00 KiB    "
                      "  512 B   4.00 KiB    3.00 ms    6.00 ms\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("is in the backward of 'out'"), std::string::npos);
  EXPECT_NE(text.find("step: train takes 120 ms per window with a CUDA graph; "
                      "the phases, measured without the graph, add up to 280 "
                      "ms\n"),
            std::string::npos)
      << text;
  const auto json = nlohmann::json::parse(to_json(profile));
  EXPECT_EQ(json["phases"][4]["increment_bytes"], -(1 << 20));
  EXPECT_EQ(json["phases_ms"], 280);
  EXPECT_EQ(json["step_ms"], 120);
  EXPECT_EQ(json["graph"], "on");
  EXPECT_EQ(json["stages"][0]["kept_bytes"], 2048);
  EXPECT_EQ(json["total"]["output_bytes"], 2048);
  EXPECT_EQ(json["total"]["backward_extra_bytes"], 4096);
  EXPECT_EQ(json["peak_at"]["stage"], "out");
  EXPECT_TRUE(json["memory"].contains("activations"));

  const auto line = [&](const std::string& graph) {
    profile.graph = graph;
    const std::string all = to_text(profile);
    const size_t start = all.find("step: ");
    return all.substr(start, all.find('\n', start) - start);
  };
  EXPECT_EQ(line("off"),
            "step: train takes 120 ms per window; the phases, measured one by "
            "one, add up to 280 ms");
  EXPECT_EQ(line("off: no room"),
            "step: train takes 120 ms per window without a CUDA graph (no "
            "room); the phases, measured one by one, add up to 280 ms");
}

}  // namespace
}  // namespace reprise
