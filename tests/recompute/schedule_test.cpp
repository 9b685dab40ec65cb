#include "support.h"

#include <reprise/recompute/schedule.h>

namespace reprise {
namespace {

std::string problem(int stages, const std::string& text) {
  return testing::error_of([&] { Schedule::parse("test", stages, text); });
}

void expect_problem(int stages, const std::string& text,
                    const std::string& what) {
  const std::string error = problem(stages, text);
  EXPECT_NE(error.find(what), std::string::npos) << text << ": " << error;
}

TEST(Schedule, ParsesWhatItPrints) {
  const std::string text = "I0 D1 K2 B2 K0 K1 X2 B1 B0";
  const auto schedule = Schedule::parse("two", 3, text);
  EXPECT_EQ(schedule.to_text(), text);
  EXPECT_EQ(schedule.forward_ops(), 3u);
  EXPECT_EQ(schedule.runs(0), 2);
  EXPECT_EQ(schedule.runs(2), 1);
  EXPECT_EQ(schedule.total_runs(), 5);
  EXPECT_EQ(to_string(schedule.ops()[6]), "discard 2");
  EXPECT_NE(schedule.to_string().find("5 stage runs (2 recomputed)"),
            std::string::npos);
  EXPECT_NE(schedule.to_string().find("   0  input kept   runs 2"),
            std::string::npos);
}

TEST(Schedule, AllowsFetchesOfKeptStagesInTheBackwardPass) {
  const std::string text = "K0.1 K1.2 F0 B1 B0";
  const auto schedule = Schedule::parse("ahead", 2, text);
  EXPECT_EQ(schedule.to_text(), text);
  EXPECT_EQ(schedule.total_runs(), 2);
  EXPECT_EQ(to_string(schedule.ops()[2]), "fetch 0");
  expect_problem(2, "K0 F0 K1 B1 B0", "the forward pass is not complete");
  expect_problem(2, "K0 K1 B1 B0 F0", "its autograd graph is not kept");
  expect_problem(2, "I0 K1 F0 B1 K0 X1 B0", "its autograd graph is not kept");
  expect_problem(2, "K0 K1 F0.1 B1 B0", "only forward-keep operations");
  expect_problem(2, "K0 K1 F2 B1 B0", "between 0 and 1");
}

TEST(Schedule, ForwardPassEndsWithTheFirstRunOfTheLastStage) {
  const auto schedule =
      Schedule::parse("all dropped", 2, "I0 D1 K0 K1 X2 B1 B0");
  EXPECT_EQ(schedule.forward_ops(), 2u);
}

TEST(Schedule, EveryBackwardNeedsItsGraph) {
  expect_problem(2, "K0 D1 B1 B0",
                 "operation 2 (backward 1): its autograd graph is not");
  expect_problem(1, "I0 B0", "its autograd graph is not kept");
}

TEST(Schedule, EveryRunNeedsItsInput) {
  expect_problem(2, "D0 K1 B1 K0 X1 B0", "boundary 0, is not held");
}

TEST(Schedule, NothingIsLeftAtTheEnd) {
  expect_problem(2, "I0 K1 B1 I0 X1 K0 B0", "boundary 1 is never released");
  expect_problem(1, "K0", "stage 0 has no backward");
  expect_problem(2, "K0 K1 B1", "stage 0 has no backward");
}

TEST(Schedule, OrderIsChecked) {
  expect_problem(2, "K0 K1 B0 B1", "the backward of stage 1 must run first");
  expect_problem(2, "K0 B0", "the forward pass is not complete");
  expect_problem(2, "I0 K1 B1 K0 K1", "its backward has already run");
  expect_problem(3, "I0 X1 I0 D1 K2", "must run stage 1 next");
  expect_problem(1, "K0 B0 B0", "the backward of stage -1 must run first");
  expect_problem(2, "I0 I0", "boundary 1, is already held");
  expect_problem(1, "K0 X1 B0", "the boundary is not held");
  expect_problem(1, "K0 B0 X7", "expected a stage between 0 and 1");
  expect_problem(0, "", "expected at least one stage");
}

TEST(Schedule, AllowsVariantsOfKeptRuns) {
  const std::string text = "I0 K1.2 B1 K0.1 X1 B0";
  const auto schedule = Schedule::parse("variants", 2, text);
  EXPECT_EQ(schedule.to_text(), text);
  EXPECT_EQ(schedule.ops()[1], (Op{OpKind::kForwardKeep, 1, 2}));
  EXPECT_EQ(to_string(schedule.ops()[1]), "forward-keep 1.2");
  EXPECT_NE(schedule.to_string().find("   1  variant 2    runs 1"),
            std::string::npos);
  expect_problem(2, "I0.1 K1 B1 K0 X1 B0", "operation 0 (forward-keep-input");
  expect_problem(1, "K0 B0.1", "only forward-keep operations have variants");
  expect_problem(1, "K0.-1 B0", "expected a non-negative variant, got -1");
}

TEST(Schedule, TextIsChecked) {
  expect_problem(1, "K0. B0", "expected an operation such as K3");
  expect_problem(1, "Q0", "expected an operation such as K3");
  expect_problem(1, "K", "expected an operation such as K3");
}

}  // namespace
}  // namespace reprise
