#include "support.h"

#include <reprise/train/summary.h>

#include <nlohmann/json.hpp>

namespace reprise {
namespace {

TrainSummary example_summary() {
  TrainSummary s;
  s.model = "bert-large";
  s.device = "cuda";
  s.precision = "fp32";
  s.optimizer = "adamw";
  s.recompute = "none";
  s.micro_batch = 4;
  s.accumulate = 1;
  s.global_batch = 4;
  s.time_s = 50;
  s.samples_per_s = 10;
  s.peak_bytes = 1000;
  s.kept_bytes = 500;
  s.loss = 0.5;
  s.peak_phase = "backward";
  s.peak_stage = "layer3";
  s.window_peak_bytes = 900;
  s.memory.bytes[0] = 100;
  return s;
}

TEST(Summary, JsonRoundTrip) {
  const auto json = nlohmann::json::parse(to_json(example_summary()));
  for (const char* key :
       {"model", "device", "precision", "optimizer", "time_s", "samples_per_s",
        "peak_bytes", "kept_bytes", "peak_at", "rss_peak_bytes", "steps",
        "loss", "micro_batch", "accumulate", "global_batch", "recompute",
        "memory"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  for (const char* key : {"parameters", "gradients", "optimizer", "activations",
                          "workspace", "data"}) {
    EXPECT_TRUE(json["memory"].contains(key)) << key;
  }
  EXPECT_EQ(json["peak_at"]["phase"], "backward");
  EXPECT_EQ(json["peak_at"]["stage"], "layer3");
  EXPECT_TRUE(json["eval_loss"].is_null());
  EXPECT_EQ(to_json(summary_from_json(to_json(example_summary()))),
            to_json(example_summary()));
  auto older = json;  // of version 0.1
  older.erase("host_state_bytes");
  EXPECT_EQ(summary_from_json(older.dump()).host_state_bytes, 0);
  EXPECT_THROW(summary_from_json("{}"), c10::Error);
}

TEST(Summary, ShowsPredictionAndMeasurement) {
  TrainSummary s = example_summary();
  EXPECT_TRUE(nlohmann::json::parse(to_json(s))["predicted"].is_null());
  EXPECT_EQ(to_table(s).find("predicted"), std::string::npos);
  s.predicted = {950, 390.5};
  s.replans = 2;
  const auto json = nlohmann::json::parse(to_json(s));
  EXPECT_EQ(json["predicted"]["peak_bytes"], 950);
  EXPECT_EQ(json["predicted"]["step_ms"], 390.5);
  EXPECT_EQ(json["step_ms"], 400);  // 4 samples at 10 samples/s
  EXPECT_EQ(json["replans"], 2);
  EXPECT_EQ(to_json(summary_from_json(to_json(s))), to_json(s));
  const std::string table = to_table(s);
  EXPECT_NE(table.find("390.5 ms"), std::string::npos);
  EXPECT_NE(table.find("400.0 ms"), std::string::npos);
  EXPECT_NE(table.find("950"), std::string::npos);
  EXPECT_NE(table.find("planned again"), std::string::npos);
}

TEST(Summary, ShowsTheStateOfCudaGraphs) {
  TrainSummary s = example_summary();
  EXPECT_EQ(to_table(s).find("CUDA graphs"), std::string::npos);
  s.graph = "on";
  s.graph_captures = 2;
  s.graph_replays = 140;
  const auto json = nlohmann::json::parse(to_json(s));
  EXPECT_EQ(json["graph"], "on");
  EXPECT_EQ(json["graph_captures"], 2);
  EXPECT_EQ(json["graph_replays"], 140);
  EXPECT_NE(to_table(s).find("2, 140 replays"), std::string::npos);
  s.graph = "off: a stage waits";
  EXPECT_NE(to_table(s).find("off: a stage waits"), std::string::npos);
  EXPECT_EQ(to_json(summary_from_json(to_json(s))), to_json(s));
}

TEST(Summary, ShowsPinnedHostMemory) {
  TrainSummary s = example_summary();
  EXPECT_EQ(to_table(s).find("on the host"), std::string::npos);
  s.host_bytes = 3 << 20;
  EXPECT_EQ(nlohmann::json::parse(to_json(s))["host_bytes"], 3 << 20);
  EXPECT_NE(to_table(s).find("Activations on the host"), std::string::npos);
  s.host_state_bytes = 5 << 20;
  EXPECT_NE(to_table(s).find("Optimizer on the host"), std::string::npos);
  EXPECT_EQ(to_json(summary_from_json(to_json(s))), to_json(s));
}

TEST(Summary, FormatsTableAndComparison) {
  const std::string table = to_table(example_summary());
  EXPECT_NE(table.find("Time"), std::string::npos);
  EXPECT_NE(table.find("Samples/second"), std::string::npos);
  EXPECT_NE(table.find("backward of layer3"), std::string::npos);
  TrainSummary after = example_summary();
  after.peak_bytes = 250;
  after.samples_per_s = 8;
  const std::string text = compare(example_summary(), after);
  EXPECT_NE(text.find("BEFORE"), std::string::npos);
  EXPECT_NE(text.find("×0.250"), std::string::npos);
  EXPECT_NE(text.find("×0.800"), std::string::npos);
}

}  // namespace
}  // namespace reprise
