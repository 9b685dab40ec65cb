#include "examples.h"
#include "support.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <numeric>

namespace reprise {
namespace {

using nlohmann::json;
using testing::example_result;
using testing::kMiB;

TEST(PlanJson, ContainsSettingsAndPredictions) {
  const auto plan = json::parse(to_json(example_result()));
  EXPECT_EQ(plan["feasible"], true);
  EXPECT_EQ(plan["budget"], 800 * kMiB);
  EXPECT_EQ(plan["smallest_bytes"], 300 * kMiB);
  EXPECT_EQ(plan["micro_batch"], 8);
  EXPECT_EQ(plan["accumulate"], 4);
  EXPECT_EQ(plan["last_micro_batch"], 8);
  EXPECT_EQ(plan["global_batch"], 32);
  EXPECT_EQ(plan["precision"], "fp32");
  EXPECT_EQ(plan["recompute"], "optimal");
  EXPECT_EQ(plan["predicted"]["peak_bytes"], 600 * kMiB);
  EXPECT_EQ(plan["predicted"]["kept_bytes"], 180 * kMiB);
  EXPECT_EQ(plan["predicted"]["host_bytes"], 0);
  EXPECT_EQ(plan["predicted"]["step_ms"], 210);
  EXPECT_EQ(plan["predicted"]["micro_ms"], 50);
  EXPECT_NEAR(plan["predicted"]["samples_per_s"], 32 / 0.21, 1e-9);
  EXPECT_FALSE(plan.contains("measured"));
}

TEST(PlanJson, ScheduleCanBeParsed) {
  const PlanResult result = example_result();
  const auto plan = json::parse(to_json(result));
  EXPECT_EQ(Schedule::parse("x", 4, plan["schedule"].get<std::string>()).ops(),
            result.plan.schedule.ops());
}

TEST(PlanJson, ReadsPlansBackUnchanged) {
  const Plan plan{
      .global_batch = 30,
      .micro_batch = 8,
      .accumulate = 4,
      .last_micro_batch = 6,
      .precision = Precision::kBf16,
      .schedule = example_result().plan.schedule,
      .peak_bytes = 600 * kMiB,
      .kept_bytes = 180 * kMiB,
      .host_bytes = 5,
      .micro_ms = 1.0 / 3,
      .step_ms = 210.1,
      .peak = testing::example_peak(),
      .graph = true,
      .update = UpdateMode::kBackward,
      .state = StatePlace::kHost,
      .host_state = {5, 6, 7},
      .bound = TimeBound::kLink,
      .weight_copies = WeightCopiesMode::kEach,
      .settings = DeviceSettings{ImageLayout::kChannelsLast, Autotune::kOn}};
  EXPECT_TRUE(plan_from_json(to_json(plan), 4) == plan);
  Plan other = plan;
  other.graph = false;
  other.weight_copies.reset();
  other.settings.reset();
  EXPECT_TRUE(plan_from_json(to_json(other), 4) == other);
  EXPECT_FALSE(other == plan);
}

TEST(PlanJson, RejectsTextsThatAreNoPlan) {
  const std::string text = to_json(example_result().plan);
  for (std::string wrong : {std::string("{}"), std::string("no JSON"),
                            text.substr(0, text.size() / 2)}) {
    EXPECT_NE(testing::error_of([&] {
                plan_from_json(wrong, 4);
              }).find("[plan] expected a plan as JSON"),
              std::string::npos)
        << wrong;
  }
  auto unknown = json::parse(text);
  unknown["precision"] = "fp8";
  EXPECT_NE(
      testing::error_of([&] { plan_from_json(unknown.dump(), 4); }).find("fp8"),
      std::string::npos);
}

TEST(PlanJson, MemoryAddsUpToThePeak) {
  const auto plan = json::parse(to_json(example_result()));
  int64_t total = 0;
  for (const auto& [name, bytes] : plan["memory"].items()) {
    total += bytes.get<int64_t>();
  }
  EXPECT_EQ(total, plan["predicted"]["peak_bytes"]);
  EXPECT_EQ(plan["memory"].size(), 7u);
  const auto& peak = plan["peak_at"];
  EXPECT_EQ(peak["phase"], "backward");
  EXPECT_EQ(peak["stage"], 1);
  EXPECT_EQ(peak["stage_name"], "block1");
  EXPECT_EQ(peak["is_floor"], true);
  const auto kept = peak["kept_by_stage"].get<std::vector<int64_t>>();
  EXPECT_EQ(std::accumulate(kept.begin(), kept.end(), int64_t{0}),
            plan["memory"]["activations"]);
}

TEST(PlanJson, ListsAreComplete) {
  const auto plan = json::parse(
      to_json(example_result(), PlanMeasurement{630 * kMiB, 199.5, 3}));
  EXPECT_EQ(plan["measured"]["peak_bytes"], 630 * kMiB);
  EXPECT_EQ(plan["measured"]["step_ms"], 199.5);
  ASSERT_EQ(plan["alternatives"].size(), 1u);
  EXPECT_EQ(plan["alternatives"][0]["micro_batch"], 4);
  EXPECT_EQ(plan["alternatives"][0]["predicted"]["step_ms"], 210);
  ASSERT_EQ(plan["frontier"].size(), 2u);
  EXPECT_EQ(plan["frontier"][0]["recompute"], "optimal");
  EXPECT_EQ(plan["frontier"][0]["peak_bytes"], 400 * kMiB);
  ASSERT_EQ(plan["references"].size(), 4u);
  EXPECT_EQ(plan["references"][3]["recompute"], "none");
  EXPECT_EQ(plan["references"][3]["micro_batch"], 32);
  ASSERT_EQ(plan["peak_reductions"].size(), 2u);
  EXPECT_EQ(plan["peak_reductions"][0]["step_ms"], 260);
  EXPECT_TRUE(plan["peak_reductions"][1]["step_ms"].is_null());
  EXPECT_EQ(plan["stages"][3], "head");
}

TEST(PlanJson, DescribesInfeasibleAndUnlimitedRequests) {
  PlanResult result = example_result();
  result.feasible = false;
  result.request.memory = 0;
  result.alternatives.clear();
  const auto plan = json::parse(to_json(result));
  EXPECT_EQ(plan["feasible"], false);
  EXPECT_TRUE(plan["budget"].is_null());
  EXPECT_EQ(plan["alternatives"], json::array());
  EXPECT_EQ(plan["micro_batch"], 8);
}

}  // namespace
}  // namespace reprise
