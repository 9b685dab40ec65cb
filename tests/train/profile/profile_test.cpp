#include "support.h"

#include <reprise/train/profile.h>
#include <reprise/train/trainer.h>

#include <nlohmann/json.hpp>

#include <algorithm>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;

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

TEST(Profile, FormatsTextAndJson) {
  TrainingProfile profile;
  profile.model = "mlp";
  profile.recompute = "all";
  profile.phases = {{"model", 0, 1 << 20, 2 << 20, 1.5},
                    {"update", 1 << 20, 0, 1 << 20, 250}};
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
  const auto json = nlohmann::json::parse(to_json(profile));
  EXPECT_EQ(json["phases"][1]["increment_bytes"], -(1 << 20));
  EXPECT_EQ(json["stages"][0]["kept_bytes"], 2048);
  EXPECT_EQ(json["total"]["output_bytes"], 2048);
  EXPECT_EQ(json["total"]["backward_extra_bytes"], 4096);
  EXPECT_EQ(json["peak_at"]["stage"], "out");
  EXPECT_TRUE(json["memory"].contains("activations"));
}

}  // namespace
}  // namespace reprise
