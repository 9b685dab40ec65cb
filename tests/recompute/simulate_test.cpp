#include "recompute/random_costs.h"
#include "support.h"

#include <reprise/recompute/simulate.h>
#include <reprise/recompute/strategy.h>

#include <numeric>

namespace reprise {
namespace {

Simulation run(const std::string& strategy, const ChainCosts& chain_costs) {
  return simulate(make_schedule(strategy, int(chain_costs.stages.size())),
                  chain_costs);
}

TEST(Simulate, EqualStagesMatchHandCalculation) {
  const auto chain_costs = ChainCosts::simple(
      10, std::vector<StageCosts>(4, StageCosts::simple(10, 5, 1, 2)));
  const auto none = run("none", chain_costs);
  EXPECT_EQ(none.kept_peak_bytes, 5 * 10 + 4 * 5);
  EXPECT_EQ(none.kept_after_forward_bytes, 5 * 10 + 4 * 5);
  EXPECT_EQ(none.time_ms, 4 * 3);
  // The caller holds the input. Live in the first backward: four outputs, the
  // tensors saved by four stages, and the gradients of the output and of the
  // last stage's input.
  EXPECT_EQ(none.peak_bytes, 4 * 15 + 10 + 10);
  EXPECT_EQ(none.peak_op, 4u);

  const auto all = run("all", chain_costs);
  EXPECT_EQ(all.kept_after_forward_bytes, 4 * 10 + 15);
  EXPECT_EQ(all.kept_peak_bytes, 4 * 10 + 15);
  EXPECT_EQ(all.runs, (std::vector<int>{2, 2, 2, 1}));
  EXPECT_EQ(all.time_ms, 7 * 1 + 4 * 2);
}

TEST(Simulate, TensorsPassedThroughCountOnce) {
  // Stage 0 creates a skip connection of 100 bytes that stages 1 and 2 pass
  // through.
  StageCosts first = StageCosts::simple(10);
  first.outputs.push_back({100, -1});
  StageCosts handing_on = StageCosts::simple(10);
  handing_on.outputs.push_back({0, 1});
  StageCosts last = StageCosts::simple(10);
  last.saved_inputs = {0, 1};
  ChainCosts chain_costs =
      ChainCosts::simple(10, {first, handing_on, handing_on, last});
  EXPECT_EQ(run("none", chain_costs).kept_peak_bytes, 50 + 100);
  EXPECT_EQ(run("all", chain_costs).kept_peak_bytes, 50 + 100);
}

TEST(Simulate, RecomputationCreatesNewBuffers) {
  StageCosts first = StageCosts::simple(0);
  first.saved_inputs.clear();
  first.saved_outputs.clear();
  first.outputs = {{100, -1}, {1, -1}};
  StageCosts second = first;
  second.outputs = {{0, 0}, {1, -1}};  // hands the 100 on
  StageCosts third = second;
  third.outputs = {{1, -1}};
  const auto chain_costs = ChainCosts::simple(0, {first, second, third});
  // The second run of stage 0 happens while boundary 2 holds the first copy.
  const auto schedule =
      Schedule::parse("both", 3, "I0 D1 I2 I0 X1 K2 X3 B2 K0 K1 X2 B1 B0");
  EXPECT_EQ(simulate(schedule, chain_costs).kept_peak_bytes, 101 + 101);
}

TEST(Simulate, TransientMemoryDeterminesThePeak) {
  auto stage = StageCosts::simple(10);
  auto big = stage;
  big.keep_extra_bytes = 1000;
  big.drop_extra_bytes = 500;
  const auto none = run("none", ChainCosts::simple(10, {stage, big, stage}));
  EXPECT_EQ(none.peak_op, 1u);
  EXPECT_EQ(none.peak_bytes, 20 + 1000);
  big.keep_extra_bytes = 0;
  big.drop_extra_bytes = 0;
  big.backward_extra_bytes = 2000;
  const auto back = run("all", ChainCosts::simple(10, {stage, big, stage}));
  EXPECT_EQ(to_string(make_schedule("all", 3).ops()[back.peak_op]),
            "backward 1");
}

TEST(Simulate, VariantsMatchHandCalculation) {
  auto stage = StageCosts::simple(10, 100, 1, 2);
  auto lean = stage;  // keeps its input alone and runs twice
  StageCosts::Variant again;
  again.saved_inputs = {0};
  again.keep_extra_bytes = 100;
  again.backward_extra_bytes = 110;
  again.forward_ms = 1;
  again.backward_ms = 3;
  lean.variants = {again};
  const auto chain_costs = ChainCosts::simple(10, {stage, lean, stage});
  const auto plain = run("none", chain_costs);
  const auto with = simulate(
      Schedule::parse("variant", 3, "K0 K1.1 K2 B2 B1 B0"), chain_costs);
  EXPECT_EQ(plain.time_ms, 9);
  EXPECT_EQ(with.time_ms, 10);
  EXPECT_EQ(plain.kept_peak_bytes, 340);
  // The output of stage 1 is the input that stage 2 saves.
  EXPECT_EQ(with.kept_peak_bytes, 240);
  EXPECT_EQ(plain.peak_bytes, 350);
  EXPECT_EQ(with.peak_bytes, 250);
  // One kept stage with its output, the caller's output, a gradient, and
  // transient memory.
  again.backward_extra_bytes = 300;
  auto higher = chain_costs;
  higher.stages[1].variants = {again};
  EXPECT_EQ(
      simulate(Schedule::parse("variant", 3, "K0 K1.1 K2 B2 B1 B0"), higher)
          .peak_bytes,
      100 + 10 + 10 + 10 + 300);
}

TEST(Simulate, CopiesOfBuffersAreHeldForRecomputedStages) {
  auto stages = std::vector<StageCosts>(4, StageCosts::simple(10, 5));
  const auto plain = ChainCosts::simple(10, stages);
  for (auto& stage : stages) stage.context_bytes = 100;
  const auto chain_costs = ChainCosts::simple(10, stages);
  EXPECT_EQ(run("none", chain_costs).peak_bytes, run("none", plain).peak_bytes);
  // Three stages hold them until their backward; the first recomputation holds
  // them twice.
  const auto all = run("all", chain_costs);
  EXPECT_EQ(all.peak_op, 5u);  // after four runs and a backward
  // The inputs of stages 1 and 2, the output of stage 2 and its gradient, and
  // the chain's output, which the caller holds.
  EXPECT_EQ(all.peak_bytes, 300 + 100 + 2 * 10 + 15 + 10 + 10);
  EXPECT_EQ(all.at_peak.kept_by_stage[2], 100 + 10 + 5);
  EXPECT_EQ(all.at_peak.workspace_bytes, 100);
}

TEST(Simulate, RejectsUnknownVariants) {
  const auto chain_costs = ChainCosts::simple(10, {StageCosts::simple(10)});
  const auto error = testing::error_of(
      [&] { simulate(Schedule::parse("variant", 1, "K0.2 B0"), chain_costs); });
  EXPECT_NE(error.find("costs for variant 2 of stage 0, got 0 variants"),
            std::string::npos)
      << error;
}

TEST(Simulate, AtPeakMatchesHandCalculation) {
  auto stage = StageCosts::simple(10, 5);
  const auto none = run("none", ChainCosts::simple(99, {stage, stage}));
  EXPECT_EQ(none.at_peak.kept_by_stage, (std::vector<int64_t>{15, 15}));
  EXPECT_EQ(none.at_peak.gradient_bytes, 10);
  EXPECT_EQ(none.at_peak.workspace_bytes, 10);
  // The caller holds the last output until the end, whether it is saved or not.
  stage.saved_inputs.clear();
  stage.saved_outputs.clear();
  auto first = stage;
  first.backward_extra_bytes = 1000;
  const auto late = run("none", ChainCosts::simple(99, {first, stage}));
  EXPECT_EQ(late.at_peak.kept_by_stage, (std::vector<int64_t>{5, 10}));
  EXPECT_EQ(late.at_peak.workspace_bytes, 1000);
}

TEST(Simulate, AtPeakAddsUp) {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    const int stages = 1 + round % 12;
    const auto chain_costs = testing::random_costs(
        random,
        {.stages = stages, .max_bytes = 50, .passed_through = round % 2 == 0});
    for (const char* strategy :
         {"none", "all", "sqrt", "checkpoints:0", "revolve:1", "revolve:3"}) {
      const auto result = run(strategy, chain_costs);
      const auto& at_peak = result.at_peak;
      ASSERT_EQ(at_peak.kept_by_stage.size(), size_t(stages));
      for (const int64_t bytes : at_peak.kept_by_stage) ASSERT_GE(bytes, 0);
      EXPECT_EQ(std::accumulate(at_peak.kept_by_stage.begin(),
                                at_peak.kept_by_stage.end(), int64_t{0}) +
                    at_peak.gradient_bytes + at_peak.workspace_bytes,
                result.peak_bytes)
          << strategy;
    }
  }
}

TEST(Simulate, RejectsAnotherNumberOfStages) {
  EXPECT_THROW(simulate(make_schedule("none", 3), ChainCosts{}), c10::Error);
}

}  // namespace
}  // namespace reprise
