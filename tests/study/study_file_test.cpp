#include "support.h"
#include "temporary.h"

#include <reprise/study/study_file.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

namespace reprise {
namespace {

using nlohmann::json;

const std::vector<std::string> kFlags = {
    "model",     "image-size", "batch",     "accumulate",     "global-batch",
    "recompute", "optimizer",  "precision", "memory",         "data",
    "lr",        "seconds",    "steps",     "epochs",         "workers",
    "depth",     "width",      "seq",       "random-samples", "heads",
    "vocab",     "ranks",      "shard"};

Study read(const std::string& text) {
  return read_study(text, "test", kFlags);
}

std::string error_in(const std::string& text) {
  return testing::error_of([&] { read(text); });
}

TEST(StudyFile, ExpandsTheProductOfTheListsInABlock) {
  const Study study = read(R"(
title: A title
views: [grid, frontier]
shared: {data: mnist, batch: 1}
runs:
  - model: a
    batch: [2, 4]
    recompute: [none, sqrt]
  - model: [b, c]
)");
  EXPECT_EQ(study.title, "A title");
  EXPECT_EQ(study.views, (std::vector<std::string>{"grid", "frontier"}));
  std::multiset<std::string> cases;
  for (const auto& run : study.runs) cases.insert(run.case_json());
  EXPECT_EQ(cases,
            (std::multiset<std::string>{
                R"({"batch":2,"data":"mnist","model":"a","recompute":"none"})",
                R"({"batch":2,"data":"mnist","model":"a","recompute":"sqrt"})",
                R"({"batch":4,"data":"mnist","model":"a","recompute":"none"})",
                R"({"batch":4,"data":"mnist","model":"a","recompute":"sqrt"})",
                R"({"batch":1,"data":"mnist","model":"b"})",
                R"({"batch":1,"data":"mnist","model":"c"})"}));
  EXPECT_EQ(study.constant, std::vector<std::string>{"data"});
}

TEST(StudyFile, LimitsProductsDependingOnAnotherFlag) {
  const Study study = read(R"(
runs:
  - model: a
    image-size: [10, 20]
    batch: [4, 8, 16]
    accumulate: [1, 2, 4]
    at-most:
      - {of: [batch, accumulate], by: image-size, limits: {10: 16, 20: 8}}
)");
  std::map<std::string, int> count;
  for (const auto& run : study.runs) {
    const int product =
        std::stoi(run.value("batch")) * std::stoi(run.value("accumulate"));
    EXPECT_LE(product, run.value("image-size") == "10" ? 16 : 8);
    ++count[run.value("image-size")];
  }
  EXPECT_EQ(count["10"], 6);
  EXPECT_EQ(count["20"], 3);
}

TEST(StudyFile, LabelsVariants) {
  const Study study = read(R"(
shared: {model: a}
runs:
  - batch: 4
    variants:
      - {label: as it is}
      - {label: smaller, batch: 1, accumulate: 4}
)");
  ASSERT_EQ(study.runs.size(), 2u);
  EXPECT_EQ(study.runs[0].label, "as it is");
  EXPECT_EQ(study.runs[1].value("batch"), "1");
  EXPECT_EQ(study.runs[1].description(), "smaller, a, 1 × 4");
}

TEST(StudyFile, OrdersACoarseGridFirst) {
  const Study study = read(R"(
repeats: 2
runs:
  - model: a
    batch: [1, 2, 3, 4, 5]
    recompute: [none, sqrt]
)");
  std::vector<std::string> order;
  for (const auto& run : study.runs) {
    order.push_back(run.value("batch") + run.value("recompute").substr(0, 1) +
                    std::to_string(run.repeat));
  }
  const std::vector<std::string> expected = {
      "1n1", "1s1", "5n1", "5s1", "3n1", "3s1", "2n1", "2s1", "4n1", "4s1",
      "1n2", "1s2", "5n2", "5s2", "3n2", "3s2", "2n2", "2s2", "4n2", "4s2"};
  EXPECT_EQ(order, expected);
}

TEST(StudyFile, RemovesDuplicateRuns) {
  const Study study = read(R"(
runs:
  - {model: a, batch: [1, 2]}
  - {model: a, batch: [2, 3]}
)");
  EXPECT_EQ(study.runs.size(), 3u);
}

TEST(StudyFile, IdsDependOnValuesRepeatStudyAndDevice) {
  StudyRun run;
  run.values = {{"model", "a"}, {"batch", "4"}};
  StudyRun other = run;
  std::reverse(other.values.begin(), other.values.end());
  EXPECT_EQ(run.id("s", "cpu"), other.id("s", "cpu"));
  EXPECT_NE(run.id("s", "cpu"), run.id("s", "gpu"));
  EXPECT_NE(run.id("s", "cpu"), run.id("t", "cpu"));
  other.repeat = 2;
  EXPECT_NE(run.id("s", "cpu"), other.id("s", "cpu"));
  other = run;
  other.values[1].second = "8";
  EXPECT_NE(run.id("s", "cpu"), other.id("s", "cpu"));
  EXPECT_EQ(run.id("s", "cpu").size(), 16u);
}

TEST(StudyFile, ReportsErrorsWithTheLineNumber) {
  EXPECT_EQ(error_in("runs:\n  - model: a\n    bacth: 4\n"),
            "[study] line 3: unknown key 'bacth'; did you mean batch?");
  EXPECT_EQ(error_in("rnus:\n  - model: a\n"),
            "[study] line 1: unknown key 'rnus'; did you mean runs?");
  EXPECT_EQ(
      error_in("runs:\n  - model: a\n    variants:\n      - {lable: x}\n"),
      "[study] line 4: unknown key 'lable'; did you mean label?");
  EXPECT_EQ(error_in("views: [gird]\nruns:\n  - model: a\n"),
            "[study] line 1: unknown key 'gird'; did you mean grid?");
  EXPECT_EQ(error_in("runs:\n  - batch: 4\n"),
            "[study] line 2: expected a model");
  EXPECT_EQ(error_in("runs:\n  - model: a\n    batch: {x: 1}\n"),
            "[study] line 3: expected a value or a list of values for batch");
  EXPECT_EQ(error_in("runs:\n  - model: a\n    at-most: [{of: [batch]}]\n"),
            "[study] line 3: expected limit: N, or by: FLAG with limits: "
            "{VALUE: N, …}");
  EXPECT_NE(error_in("runs: [").find("[study] line 1"), std::string::npos);
  EXPECT_NE(error_in("title: x\n").find("expected runs"), std::string::npos);
  EXPECT_NE(error_in("- a\n").find("expected keys"), std::string::npos);
  EXPECT_NE(error_in("runs:\n  - model: a\n    batch: 4\n    at-most: [{of: "
                     "[batch], limit: 2}]\n")
                .find("leave no run"),
            std::string::npos);
  EXPECT_NE(testing::error_of([] {
              open_study("quikc", kFlags);
            }).find("did you mean quick?"),
            std::string::npos);
}

TEST(StudyFile, RejectsDuplicateKeys) {
  EXPECT_EQ(error_in("title: a\nruns:\n  - model: a\ntitle: b\n"),
            "[study] line 4: the key 'title' occurs twice; remove one");
  EXPECT_EQ(error_in("runs:\n  - {model: a, batch: 2, batch: 4}\n"),
            "[study] line 2: the key 'batch' occurs twice; remove one");
  EXPECT_EQ(error_in("shared:\n  steps: 1\n  steps: 2\nruns:\n  - model: a\n"),
            "[study] line 3: the key 'steps' occurs twice; remove one");
}

TEST(StudyFile, RejectsRecursiveAndExplodingAliases) {
  EXPECT_NE(error_in("reference: &x [*x]\nruns:\n  - model: a\n"), "");
  std::string bombs = "reference:\n  a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n";
  for (char c = 'b'; c < 'i'; ++c) {
    const std::string name(1, c);
    const std::string last = std::string("*") + static_cast<char>(c - 1);
    bombs += "  " + name + ": &" + name + " [";
    for (int i = 0; i < 7; ++i) bombs += last + ", ";
    bombs += last + "]\n";
  }
  EXPECT_NE(error_in(bombs + "runs:\n  - model: a\n").find("too large"),
            std::string::npos);
}

TEST(StudyFile, RejectsNumbersOutOfRange) {
  const auto expect = [](const std::string& line, const char* part) {
    const std::string text = error_in(line + "\nruns:\n  - model: a\n");
    EXPECT_NE(text.find(part), std::string::npos) << line << ": " << text;
  };
  for (const char* value : {"0", "-1", "1.5", "many", "1e300", "100000"}) {
    expect(std::string("repeats: ") + value,
           "line 1: repeats: expected a whole number from 1 to 1000");
  }
  for (const char* value : {"0", "-1", "nan", "soon"}) {
    expect(std::string("timeout: ") + value,
           "line 1: timeout: expected a number above 0");
  }
  expect("repeats: [1]", "expected repeats: a number");
}

TEST(StudyFile, OnlyListsTheExistingValues) {
  const char* text = "runs:\n  - {model: [mlp, gpt2], batch: 1}\n";
  Study study = read(text);
  EXPECT_NE(
      testing::error_of([&] { study.only("model", "mpl"); })
          .find("no run has model mpl; expected one of mlp, gpt2; did you "
                "mean mlp?"),
      std::string::npos);
  EXPECT_NE(testing::error_of([&] {
              study.only("depth", "2");
            }).find("no run sets depth"),
            std::string::npos);
  EXPECT_EQ(study.runs.size(), 2u);  // unchanged
}

TEST(StudyFile, SetsFlagsAndSelectsRuns) {
  Study study = read("runs:\n  - {model: [a, b], batch: [1, 2], epochs: 2}\n");
  study.only("model", "b");
  EXPECT_EQ(study.runs.size(), 2u);
  study.set("seconds", "1");
  for (const auto& run : study.runs) {
    EXPECT_EQ(run.value("seconds"), "1");
    EXPECT_EQ(run.value("epochs"), "");
  }
  study.set("batch", "7");
  EXPECT_EQ(study.runs.size(), 1u);
  EXPECT_THROW(study.only("model", "c"), c10::Error);
}

/// The published experiment has 82 triples for two optimizers, with and without
/// recomputation.
TEST(StudyFile, MnistStudyCoversThePublishedExperiment) {
  const Study study = open_study("mnist", kFlags);
  EXPECT_EQ(study.runs.size(), 82u * 2 * 2);
  std::set<std::string> triples;
  for (const auto& run : study.runs) {
    triples.insert(run.value("image-size") + " " + run.value("batch") + " " +
                   run.value("accumulate"));
  }
  EXPECT_EQ(triples.size(), 82u);
}

TEST(StudyFile, ReadsAllBuiltInStudies) {
  std::set<std::string> names;
  for (const auto& [name, text] : shipped_studies()) {
    names.insert(name);
    const Study study = read_study(text, name, kFlags);
    EXPECT_FALSE(study.title.empty());
    EXPECT_FALSE(study.question.empty());
    EXPECT_FALSE(study.views.empty());
    EXPECT_GT(study.runs.size(), 5u);
    // Every published row must correspond to a run.
    const json reference = json::parse(study.reference);
    if (!reference.is_object()) continue;
    for (const json& row : reference["rows"]) {
      const bool found = std::any_of(
          study.runs.begin(), study.runs.end(), [&](const StudyRun& run) {
            if (row.contains("label")) return json(run.label) == row["label"];
            const json values = json::parse(run.case_json());
            for (const auto& [key, value] : row["case"].items()) {
              if (values.value(key, json()) != value) return false;
            }
            return true;
          });
      EXPECT_TRUE(found) << name << ": " << row.dump();
    }
  }
  EXPECT_EQ(names, (std::set<std::string>{"bert", "checkpoints", "frontier",
                                          "gpt2", "mnist", "quick", "ranks"}));
}

TEST(StudyFile, AliasesOfLongTextsAreCounted) {
  std::string text =
      "reference:\n  s: &s " + std::string(100'000, 'x') + "\n  l: [*s";
  for (int i = 0; i < 1000; ++i) text += ", *s";
  text += "]\nruns:\n  - model: a\n";
  EXPECT_NE(error_in(text).find("its aliases make it too large"),
            std::string::npos);
}

TEST(StudyFile, RunsWithLongValuesHaveALimit) {
  std::string text =
      "runs:\n  - model: " + std::string(100'000, 'x') + "\n    batch: [1";
  for (int i = 2; i <= 10'000; ++i) text += ", " + std::to_string(i);
  text += "]\n";
  const std::string error = error_in(text);
  EXPECT_NE(error.find("10000 runs with values this long"), std::string::npos)
      << error;
  EXPECT_NE(error_in("repeats: 2000000000\nruns: [{model: a}]")
                .find("expected a whole number from 1 to 1000"),
            std::string::npos);
}

TEST(StudyFile, MessagesNameTheFile) {
  const testing::TemporaryDirectory folder;
  const std::string path = folder / "mine.yaml";
  std::ofstream(path) << "runs:\n  - bacth: 1\n";
  EXPECT_EQ(
      testing::error_of([&] { open_study(path, kFlags); }),
      "[study] " + path + ", line 2: unknown key 'bacth'; did you mean batch?");
  std::ofstream(path) << std::string(2 << 20, '#');
  EXPECT_NE(testing::error_of([&] {
              open_study(path, kFlags);
            }).find(path + ": expected at most 1.00 MiB"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
