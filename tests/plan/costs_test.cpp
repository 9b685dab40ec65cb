#include "support.h"

#include <reprise/plan/costs.h>

namespace reprise {
namespace {

using testing::error_of;

/// Returns costs of one stage that are linear in the size.
SizeCosts line_at(int64_t b) {
  SizeCosts size;
  size.micro_batch = b;
  StageCosts stage = StageCosts::simple(100 * b, 50 + 10 * b,
                                        1.0 + 0.5 * double(b), double(b));
  stage.forward_launch_ms = 2;
  stage.context_bytes = 24;  // independent of the size
  KeptRunCosts host = stage;
  host.saved_bytes = 0;
  host.host_bytes = stage.saved_bytes;
  stage.variants.push_back(host);
  size.chain_costs = ChainCosts::simple(8 * b, {stage});
  size.data_bytes = 16 * b;
  size.prepare_bytes = 40 * b;
  size.workspace_bytes = 5;  // independent of the size
  size.graph_workspace_bytes = 3;
  size.other_ms = 0.25;
  return size;
}

void expect_equal(const SizeCosts& a, const SizeCosts& b) {
  CostProfile first, second;
  first.add(a);
  second.add(b);
  EXPECT_EQ(to_json(first), to_json(second));
}

TEST(Costs, InterpolateLinearly) {
  CostProfile profile;
  profile.add(line_at(8));
  profile.add(line_at(2));
  profile.add(line_at(32));
  ASSERT_EQ(profile.sizes.size(), 3u);
  EXPECT_TRUE(profile.measured(8));
  EXPECT_FALSE(profile.measured(4));
  for (const int64_t b : {1, 2, 5, 8, 20, 32, 64}) {
    expect_equal(profile.at(b), line_at(b));
  }
}

TEST(Costs, ScaleProportionallyFromOneSize) {
  CostProfile profile;
  profile.add(line_at(4));
  const SizeCosts half = profile.at(2);
  EXPECT_EQ(half.chain_costs.stages[0].outputs[0].bytes, 200);
  EXPECT_EQ(half.chain_costs.stages[0].saved_bytes, 45);
  EXPECT_DOUBLE_EQ(half.chain_costs.stages[0].forward_ms, 1.5);
  EXPECT_EQ(half.data_bytes, 32);
}

TEST(Costs, ScaleTheLargerSizeIfTensorsAreSharedAtOneSizeOnly) {
  // At one sample the stage returns a view of its input, and no buffer of its own.
  SizeCosts one = line_at(1);
  StageCosts& view = one.chain_costs.stages[0];
  view.outputs[0].input = 0;
  view.saved_outputs.clear();
  CostProfile profile;
  profile.add(one);
  profile.add(line_at(8));
  CostProfile larger;
  larger.add(line_at(8));
  for (const int64_t b : {2, 4, 7, 16}) {
    expect_equal(profile.at(b), larger.at(b));
  }
  expect_equal(profile.at(1), one);
  profile.add(line_at(16));
  expect_equal(profile.at(12), line_at(12));

  // Another number of buffers.
  one.chain_costs.stages[0].outputs.push_back({10, -1});
  profile.add(one);
  expect_equal(profile.at(4), larger.at(4));
}

TEST(Costs, NeverFallBelowZero) {
  CostProfile profile;
  SizeCosts two = line_at(2);
  SizeCosts four = line_at(4);
  two.chain_costs.stages[0].backward_extra_bytes = 0;
  four.chain_costs.stages[0].backward_extra_bytes = 100;  // another algorithm
  profile.add(two);
  profile.add(four);
  EXPECT_EQ(profile.at(1).chain_costs.stages[0].backward_extra_bytes, 0);
}

TEST(Costs, AMeasurementReplacesAnEarlierOne) {
  CostProfile profile;
  profile.add(line_at(2));
  SizeCosts again = line_at(2);
  again.data_bytes = 7;
  profile.add(again);
  ASSERT_EQ(profile.sizes.size(), 1u);
  EXPECT_EQ(profile.at(2).data_bytes, 7);
}

TEST(Costs, RoundTripThroughJson) {
  CostProfile profile;
  profile.key = "a model";
  profile.precision = Precision::kBf16;
  profile.stages = {"only"};
  profile.gradient_bytes = {40};
  profile.held_twice_bytes = {8};
  profile.fixed = {1, 2, 3, 4, 5};
  profile.update_ms = 0.1;
  profile.update_bytes = 6;
  profile.add(line_at(3));
  profile.add(line_at(5));
  profile.add(TriedSchedule{3, "K0 B0", 2.5});
  profile.add(TriedSchedule{3, "K0 B0", 1.5});
  profile.add(TriedSchedule{3, "K0 B0", 0.5, true});
  profile.add(TriedSchedule{3, "K0 B0", 4.5, false, 0, UpdateMode::kBackward});
  profile.final_gradient_bytes = {40};
  profile.stage_update_bytes = {7};
  profile.captures_update = true;
  profile.host_state_bytes = 9;
  profile.graph = GraphMode::kAuto;
  const std::string text = to_json(profile);
  const CostProfile read = profile_from_json(text);
  EXPECT_EQ(to_json(read), text);
  EXPECT_EQ(read.fixed.total(), 15);
  EXPECT_EQ(read.key, "a model");
  ASSERT_EQ(read.tried.size(), 3u);
  EXPECT_EQ(read.tried_ms(3, "K0 B0", false), 1.5);
  EXPECT_EQ(read.tried_ms(3, "K0 B0", false, UpdateMode::kBackward), 4.5);
  EXPECT_FALSE(read.tried_ms(3, "K0 B0", true, UpdateMode::kBackward));
  EXPECT_EQ(read.final_gradient_bytes, profile.final_gradient_bytes);
  EXPECT_EQ(read.stage_update_bytes, profile.stage_update_bytes);
  EXPECT_TRUE(read.captures_update);
  EXPECT_EQ(read.host_state_bytes, 9);
  EXPECT_EQ(read.tried_ms(3, "K0 B0", true), 0.5);
  EXPECT_FALSE(read.tried_ms(5, "K0 B0", false));
  EXPECT_FALSE(read.tried_ms(3, "D0 K0 B0", false));
  EXPECT_EQ(read.graph, GraphMode::kAuto);
  EXPECT_EQ(read.at(4).chain_costs.stages[0].outputs[0].bytes, 400);
  for (const char* wrong : {"", "{", "{}", "[1]"}) {
    EXPECT_NE(error_of([&] {
                profile_from_json(wrong);
              }).find("[profile_from_json] not a cost profile"),
              std::string::npos)
        << wrong;
  }
}

TEST(Costs, ReadProfilesWithoutTimings) {
  CostProfile profile;
  profile.add(line_at(3));
  std::string text = to_json(profile);
  const std::string field = "\"tried\":[],";
  const size_t at = text.find(field);
  ASSERT_NE(at, std::string::npos) << text;
  text.erase(at, field.size());
  const CostProfile read = profile_from_json(text);
  EXPECT_TRUE(read.tried.empty());
  EXPECT_EQ(to_json(read), to_json(profile));
}

/// The error of reading a profile of one stage in which `from` is replaced by `to`.
std::string error_of_changed(const std::string& from, const std::string& to) {
  CostProfile profile;
  profile.stages = {"only"};
  profile.gradient_bytes = profile.held_twice_bytes = {40};
  profile.add(line_at(3));
  profile.add(TriedSchedule{3, "K0 B0", 2.5});
  std::string text = to_json(profile);
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from << " in " << text;
  text.replace(at, from.size(), to);
  return error_of([&] { profile_from_json(text); });
}

TEST(Costs, RejectValuesThatDoNotFitEachOther) {
  const std::vector<std::pair<std::string, std::string>> changes = {
      {R"("outputs":[[300,-1]])", R"("outputs":[[300,7]])"},
      {R"("outputs":[[300,-1]])", R"("outputs":[[-300,-1]])"},
      {R"("outputs":[[300,-1]])", R"("outputs":[[9223372036854775807,-1]])"},
      {R"("outputs":[[300,-1]])", R"("outputs":null)"},
      {R"("host_bytes":0)", R"("host_bytes":-1)"},
      {R"("host_bytes":0)", R"("host_bytes":1e300)"},
      {R"("saved_inputs":[0])", R"("saved_inputs":[1])"},
      {R"("saved_outputs":[0])", R"("saved_outputs":[-1])"},
      {R"("forward_ms":2.5)", R"("forward_ms":-2.5)"},
      {R"("micro_batch":3)", R"("micro_batch":0)"},
      {R"("gradient_bytes":[40])", R"("gradient_bytes":[])"},
      {R"("gradient_bytes":[40])", R"("gradient_bytes":[40,40])"},
      {R"("stages":["only"])", R"("stages":["one","two"])"},
      {R"("schedule":"K0 B0")", R"("schedule":"K0 K1 B0")"},
      {R"("schedule":"K0 B0")", R"("schedule":"K0.2 B0")"},
      {R"("ms":2.5,"s)", R"("ms":0,"s)"},
      {R"("update_ms":0.0)", R"("update_ms":)" + std::string(1000, '[')}};
  for (const auto& [from, to] : changes) {
    EXPECT_NE(error_of_changed(from, to).find("not a cost profile"),
              std::string::npos)
        << to;
  }
}

TEST(Costs, RejectLookupsWithoutMeasurements) {
  EXPECT_NE(error_of([] { CostProfile().at(1); }).find("[CostProfile::at]"),
            std::string::npos);
  CostProfile profile;
  profile.add(line_at(1));
  EXPECT_THROW(profile.at(0), c10::Error);
}

}  // namespace
}  // namespace reprise
