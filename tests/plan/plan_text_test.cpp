#include "examples.h"

#include <reprise/base/bytes.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

namespace reprise {
namespace {

using testing::example_plan;
using testing::example_result;
using testing::kMiB;
using testing::long_result;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// Returns the number of characters, not bytes.
size_t columns(const std::string& line) {
  return static_cast<size_t>(std::count_if(
      line.begin(), line.end(),
      [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

void expect_line(const std::string& text, const std::string& line) {
  const auto lines = lines_of(text);
  EXPECT_NE(std::find(lines.begin(), lines.end(), line), lines.end())
      << "no line '" << line << "' in\n"
      << text;
}

void expect_narrow(const std::string& text) {
  for (const auto& line : lines_of(text)) {
    EXPECT_LE(columns(line), 100u) << line;
    EXPECT_TRUE(line.empty() || line.back() != ' ') << "'" << line << "'";
  }
}

TEST(PlanText, ShowsSettingsAndPrediction) {
  const std::string text = to_text(example_result());
  expect_line(text, "micro-batch 8 × 4 = 32 samples per update, fp32");
  expect_line(text,
              "recompute optimal: keeps 2 of 4 stages, recomputes 2 once");
  expect_line(text,
              "predicted  peak 600 MiB, 75.0 % of the budget of 800 MiB; step "
              "210 ms, 152.4 samples/s");
  expect_narrow(text);
}

TEST(PlanText, ShowsHostMemory) {
  PlanResult result = example_result();
  EXPECT_EQ(to_text(result).find("\nhost "), std::string::npos);
  result.plan.host_bytes = 96 * kMiB;
  expect_line(to_text(result),
              "host       96.0 MiB of activations in host memory");
  expect_narrow(to_text(result));
}

TEST(PlanText, ShowsASmallerLastMicroBatch) {
  PlanResult result = example_result();
  result.plan.micro_batch = 12;
  result.plan.accumulate = 3;
  result.plan.last_micro_batch = 8;
  result.plan.schedule = make_schedule("none", 4);
  const std::string text = to_text(result);
  expect_line(
      text,
      "micro-batch 12 × 3 (the last one 8) = 32 samples per update, fp32");
  expect_line(text, "recompute none: keeps all 4 stages");
}

TEST(PlanText, ComparesMeasurementWithPrediction) {
  EXPECT_EQ(to_text(example_result()).find("measured"), std::string::npos);
  expect_line(to_text(example_result(), PlanMeasurement{630 * kMiB, 199.5, 3}),
              "measured   peak 630 MiB (+5.0 % against predicted); step 200 ms "
              "± 3.00 ms (-5.0 %)");
}

TEST(PlanText, DrawsStackedBars) {
  const std::string text = to_text(example_result());
  // 48 columns represent 800 MiB: 60 MiB end at 3.6, 120 at 7.2, 240 at 14.4.
  expect_line(text, "  parameters            60.0 MiB   10.0 %  ████" +
                        std::string(44, ' ') + "│");
  expect_line(text,
              "  optimizer              120 MiB   20.0 %         ███████" +
                  std::string(34, ' ') + "│");
  expect_line(text,
              "  budget                 800 MiB" + std::string(59, ' ') + "┴");
}

TEST(PlanText, ExplainsThePeak) {
  const std::string text = to_text(example_result());
  expect_line(text, "The peak is in the backward of stage 1 'block1'");
  expect_line(text,
              "  largest kept: 'stem' 100 MiB, 'block1' 80.0 MiB, 'block2' "
              "20.0 MiB, 1 other 10.0 MiB");
  expect_line(text, "  no schedule lowers it at micro-batch 8");
  expect_line(text,
              "  micro-batch 4 instead of 8     400 MiB     200 MiB     260 ms "
              "  +23.8 %");
  expect_line(text,
              "  sgd instead of adamw           480 MiB     120 MiB          - "
              "        -");
  PlanResult other = example_result();
  other.plan.peak.is_floor = false;
  other.plan.peak.phase = "update";
  other.plan.peak.stage = -1;
  expect_line(to_text(other), "The peak is in the update");
  EXPECT_EQ(to_text(other).find("no schedule"), std::string::npos);
}

TEST(PlanText, DrawsTheChain) {
  const std::string text = to_text(example_result());
  expect_line(text, "      0  ▒▒▒▒▒▒▒▒████████");
  expect_line(text, "  stages with kept input: 0 'stem'");
  // With one slot, stage i runs n - i times.
  PlanResult often = example_result();
  often.plan.schedule = make_schedule("revolve:1", 4);
  expect_line(to_text(often), "      0  ░░░░░░░░▒▒▒▒████");
  expect_line(to_text(often),
              "recompute revolve:1: keeps 1 of 4 stages, recomputes 1 once and "
              "2 up to 3 times");
}

TEST(PlanText, MarksStagesKeptInPart) {
  PlanResult result = example_result();
  result.plan.schedule =
      Schedule::parse("optimal", 4, "K0.1 K1 K2 K3 B3 B2 B1 B0");
  const std::string text = to_text(result);
  expect_line(text, "recompute optimal: keeps all 4 stages, 1 of them in part");
  expect_line(text, "      0  ▓▓▓▓████████████");
  expect_line(text,
              "         █ kept  ▓ kept in part  ▒ recomputed once  ░ more "
              "often");
}

TEST(PlanText, PlotsTheFrontier) {
  const std::string text = to_text(example_result());
  // x: 400 to 800 MiB in 60 columns; y: 200 to 280 ms in 14 rows.
  expect_line(text, "      280 ms ┤       A" + std::string(51, ' ') + "│");
  expect_line(text, "             │·" + std::string(58, ' ') + "│");
  expect_line(text, "             │" + std::string(30, ' ') + "◆" +
                        std::string(28, ' ') + "│");
  expect_line(text,
              "  outside the plot: none at micro-batch 32 (1.95 GiB, 190 ms)");
  // A budget far from all points is not plotted.
  PlanResult wide = example_result();
  wide.request.memory = 1001 * kMiB;
  EXPECT_NE(to_text(wide).find("the budget (0.98 GiB)"), std::string::npos);
  wide.request.memory = 99 * kMiB;
  EXPECT_NE(to_text(wide).find("the budget (99.0 MiB)"), std::string::npos);
  PlanResult one = example_result();
  one.frontier.resize(1);
  one.references.clear();
  expect_narrow(to_text(one));
}

TEST(PlanText, ListsAlternatives) {
  PlanResult result = example_result();
  result.alternatives = {example_plan(4, 8, make_schedule("revolve:1", 4))};
  expect_line(
      to_text(result),
      "            4             8       fp32    600 MiB     210 ms     "
      "  152.4           6");
}

TEST(PlanText, FitsManyStagesInto100Columns) {
  for (const int stages : {81, 300, 5000}) {
    for (const char* strategy : {"none", "all", "sqrt"}) {
      const std::string text = to_text(long_result(stages, strategy));
      expect_narrow(text);
      EXPECT_LT(lines_of(text).size(), 75u);
    }
  }
  const std::string text = to_text(long_result(300, "sqrt"));
  EXPECT_NE(text.find("\n    240  ▒"), std::string::npos);
}

TEST(PlanText, SuggestsABudgetIfNothingFits) {
  PlanResult result = example_result();
  result.feasible = false;
  result.alternatives.clear();
  result.request.memory = 200 * kMiB;
  const std::string text = to_text(result);
  EXPECT_EQ(lines_of(text).front(),
            "Nothing fits into 200 MiB (209715200 bytes): the smallest plan "
            "needs 300 MiB (314572800 bytes)");
  expect_line(text, "micro-batch 8 × 4 = 32 samples per update, fp32");
  EXPECT_NE(text.find("sgd instead of adamw"), std::string::npos);
  EXPECT_EQ(text.find("Other choices"), std::string::npos);
  expect_narrow(text);
}

/// Both numbers of the suggested budget are sufficient, and differ from the
/// text of the rejected budget.
TEST(PlanText, SuggestedBudgetIsSufficient) {
  PlanResult result = example_result();
  result.feasible = false;
  for (const int64_t bytes :
       {int64_t{999}, int64_t{1025}, int64_t{1047553}, 5 * kMiB + 293601,
        300 * kMiB + 1, 1023 * kMiB + 7, (int64_t{1} << 40) + 12345}) {
    result.smallest_bytes = bytes;
    result.request.memory = bytes - 1;
    const std::string line = lines_of(to_text(result)).front();
    const size_t colon = line.find(": the smallest plan needs ");
    ASSERT_NE(colon, std::string::npos) << line;
    const std::string needs = line.substr(colon + 26);
    const size_t open = needs.find(" (");
    EXPECT_GE(parse_bytes(needs.substr(0, open)), bytes) << line;
    EXPECT_LE(double(parse_bytes(needs.substr(0, open))), double(bytes) * 1.01)
        << line;
    EXPECT_EQ(std::stoll(needs.substr(open + 2)), bytes) << line;
    EXPECT_EQ(line.find(needs), colon + 26) << line;
  }
}

}  // namespace
}  // namespace reprise
