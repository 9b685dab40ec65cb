#include "plan/examples.h"

#include <reprise/train/planning.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace reprise {
namespace {

using testing::example_plan;
using testing::kMiB;

Largest example_largest() {
  Largest largest;
  largest.axis = LargestAxis::kBatch;
  largest.plain = 12;
  largest.value = 96;
  largest.plain_peak_bytes = 500 * kMiB;
  largest.peak_bytes = 510 * kMiB;
  largest.plan = example_plan(8, 4, make_segments("optimal", 4, {0, 2}));
  return largest;
}

TEST(Largest, FormatsText) {
  EXPECT_EQ(to_text(example_largest()),
            "batch 96 fits, 8.0 times the 12 that fit without any technique\n"
            "  no technique        12  peak 500 MiB\n"
            "  planned             96  peak 510 MiB\n"
            "micro-batch 8 × 4 = 32 samples per update, fp32\n"
            "recompute optimal: keeps 2 of 4 stages, recomputes 2 once\n");
}

TEST(Largest, FormatsAnInfeasibleSearch) {
  Largest largest = example_largest();
  largest.plain = 0;
  EXPECT_EQ(to_text(largest).substr(0, to_text(largest).find('\n')),
            "batch 96 fits; without any technique not even the smallest does");
  largest.value = 0;
  largest.plan.reset();
  EXPECT_EQ(to_text(largest), "not even the smallest batch fits\n");
  const auto json = nlohmann::json::parse(to_json(largest));
  EXPECT_TRUE(json["factor"].is_null());
  EXPECT_TRUE(json["plan"].is_null());
}

TEST(Largest, FormatsJson) {
  const auto json = nlohmann::json::parse(to_json(example_largest()));
  EXPECT_EQ(json["axis"], "batch");
  EXPECT_EQ(json["value"], 96);
  EXPECT_EQ(json["plain"], 12);
  EXPECT_EQ(json["factor"], 8.0);
  EXPECT_EQ(json["peak_bytes"], 510 * kMiB);
  EXPECT_EQ(json["plan"]["micro_batch"], 8);
  EXPECT_EQ(json["plan"]["predicted"]["step_ms"], 210);
}

}  // namespace
}  // namespace reprise
