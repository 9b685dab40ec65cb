#include "support.h"

#include <reprise/train/optimizer.h>

#include <cmath>

namespace reprise {
namespace {

using testing::error_of;

LrScheduleOptions cosine() {
  LrScheduleOptions options;
  options.base = 0.5;
  options.schedule = LrScheduleKind::kCosine;
  options.warmup_steps = 5;
  options.total_steps = 25;
  options.lowest = 0.1;
  return options;
}

TEST(LrSchedule, WarmsUpLinearly) {
  LrScheduleOptions options;
  options.base = 0.4;
  options.warmup_steps = 4;
  EXPECT_DOUBLE_EQ(rate_at(options, 0), 0.1);
  EXPECT_DOUBLE_EQ(rate_at(options, 2), 0.3);
  EXPECT_DOUBLE_EQ(rate_at(options, 3), 0.4);
  EXPECT_DOUBLE_EQ(rate_at(options, 1000000), 0.4);
  options.warmup_steps = 0;
  EXPECT_DOUBLE_EQ(rate_at(options, 0), 0.4);
}

TEST(LrSchedule, DecaysAlongAHalfCosine) {
  const auto options = cosine();
  EXPECT_DOUBLE_EQ(rate_at(options, 0), 0.1);
  EXPECT_DOUBLE_EQ(rate_at(options, 4), 0.5);
  EXPECT_DOUBLE_EQ(rate_at(options, 5), 0.5);
  EXPECT_DOUBLE_EQ(rate_at(options, 10), 0.3 + 0.2 * std::sqrt(0.5));
  EXPECT_DOUBLE_EQ(rate_at(options, 15), 0.3);
  EXPECT_DOUBLE_EQ(rate_at(options, 25), 0.1);
  EXPECT_DOUBLE_EQ(rate_at(options, 99), 0.1);
  for (int64_t step = 5; step < 25; ++step) {
    EXPECT_GT(rate_at(options, step), rate_at(options, step + 1)) << step;
  }
}

TEST(LrSchedule, RejectsOptionsOutOfRange) {
  const auto expect_error = [](const std::string& part, auto&& change) {
    LrScheduleOptions options = cosine();
    change(options);
    // Options are checked in the warm-up, before the schedule begins.
    const auto error = error_of([&] { rate_at(options, 0); });
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };
  using O = LrScheduleOptions;
  expect_error("total_steps above the 5 of the warm-up for cosine, got 5",
               [](O& o) { o.total_steps = 5; });
  expect_error("lowest between 0 and the base 0.5, got 0.6",
               [](O& o) { o.lowest = 0.6; });
  expect_error("a base of 0 or more, got -1", [](O& o) { o.base = -1; });
  expect_error("warmup_steps of 0 or more", [](O& o) { o.warmup_steps = -1; });
  EXPECT_NE(error_of([] { rate_at(cosine(), -1); }).find("a step of 0 or more"),
            std::string::npos);
}

TEST(LrSchedule, ScalesWithTheBatchSize) {
  EXPECT_DOUBLE_EQ(scale_rate(0.1, LrScaling::kNone, 1024, 256), 0.1);
  EXPECT_DOUBLE_EQ(scale_rate(0.1, LrScaling::kLinear, 1024, 256), 0.4);
  EXPECT_DOUBLE_EQ(scale_rate(0.1, LrScaling::kSqrt, 1024, 256), 0.2);
  EXPECT_DOUBLE_EQ(scale_rate(0.1, LrScaling::kLinear, 64, 256), 0.025);
  EXPECT_NE(error_of([] {
              scale_rate(0.1, LrScaling::kLinear, 2, 0);
            }).find("batches above 0, got 2 and 0"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
