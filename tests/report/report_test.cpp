#include "temporary.h"

#include <reprise/base/error.h>
#include <reprise/report/report.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>

namespace reprise {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Report : public ::testing::Test {
 protected:
  Report() { options_.page = write("page.html", "before @RESULTS@ after"); }

  std::string write(const std::string& name, const std::string& text) {
    const std::string path = folder_ / name;
    std::ofstream(path) << text;
    return path;
  }

  /// The records in the page, as its script reads them.
  json records(const std::vector<json>& lines) {
    std::string text;
    for (const json& line : lines) text += line.dump() + "\n";
    write("results.jsonl", text);
    html_ = make_report({folder_.path()}, options_);
    return parsed(html_).at("records");
  }

  /// The JSON that replaces the placeholder.
  static json parsed(const std::string& html) {
    const size_t from = html.find("before ") + 7;
    return json::parse(html.substr(from, html.find(" after") - from));
  }

  testing::TemporaryDirectory folder_;
  ReportOptions options_;
  std::string html_;
};

json run(const std::string& id) {
  return {{"type", "run"}, {"id", id}, {"series", nullptr}};
}

TEST_F(Report, PutsRecordsIntoThePage) {
  const json found =
      records({run("a"), {{"type", "study"}, {"study", "s"}}, run("b")});
  ASSERT_EQ(found.size(), 3);
  EXPECT_EQ(found[0]["study"], "s");  // studies first
  EXPECT_EQ(found[1]["id"], "a");
  EXPECT_EQ(found[2]["id"], "b");
}

TEST_F(Report, NamesTheDirectoryOfEachRun) {
  const std::string line = run("a").dump() + "\n";
  std::vector<std::string> paths;
  for (const std::string name : {"one", "two/same", "three/same"}) {
    const fs::path directory = fs::path(folder_.path()) / name;
    fs::create_directories(directory);
    paths.push_back(directory);
    std::ofstream(directory / "results.jsonl") << line;
  }
  paths[0] += "/results.jsonl";
  paths[1] += "/";
  const json page = parsed(make_report(paths, options_));
  const json& found = page.at("records");
  ASSERT_EQ(found.size(), 3);  // the same id in three directories
  EXPECT_EQ(found[0]["source"], "one");
  EXPECT_EQ(found[1]["source"], std::string(folder_ / "two/same"));
  EXPECT_EQ(found[2]["source"], std::string(folder_ / "three/same"));
}

TEST_F(Report, RecordsTheTimeOfCreation) {
  write("results.jsonl", run("a").dump() + "\n");
  std::tm parts{};
  const std::string made =
      parsed(make_report({folder_.path()}, options_)).at("made");
  ASSERT_NE(strptime(made.c_str(), "%Y-%m-%dT%H:%M:%SZ", &parts), nullptr);
  EXPECT_LT(std::abs(std::difftime(timegm(&parts), std::time(nullptr))), 60);
}

TEST_F(Report, EscapesTextThatWouldEndTheScript) {
  json line = run("a");
  line["reason"] = "</script><!-- é";
  EXPECT_EQ(records({line})[0]["reason"], "</script><!-- é");
  EXPECT_EQ(html_.find('<'), std::string::npos);
}

TEST_F(Report, KeepsNumbersExactly) {
  json line = run("a");
  line["figures"] = {{"samples_per_s", 678.9712740727275},
                     {"peak_bytes", 9007199254740991}};
  EXPECT_EQ(records({line})[0]["figures"], line["figures"]);
}

TEST_F(Report, DownsamplesSeriesButKeepsPeaks) {
  json line = run("a");
  json& series = line["series"];
  for (int i = 0; i < 90; ++i) {
    series["t_s"].push_back(i);
    series["memory_bytes"].push_back(i == 47 ? 1000 : i);
    series["utilisation"].push_back(i + 0.5);
  }
  options_.series_points = 40;
  const json thin = records({line})[0]["series"];
  EXPECT_EQ(thin["t_s"].size(), 30);
  EXPECT_EQ(thin["memory_bytes"].size(), 30);
  EXPECT_EQ(thin["memory_bytes"][15], 1000);
  EXPECT_EQ(thin["t_s"][15], 47);
  EXPECT_EQ(thin["utilisation"][15], 47.5);
  options_.series_points = 1000;
  EXPECT_EQ(records({line})[0]["series"], series);
}

TEST_F(Report, RejectsFilesThatAreNoPage) {
  write("results.jsonl", run("a").dump() + "\n");
  options_.page = write("other.html", "nothing");
  EXPECT_THROW(make_report({folder_.path()}, options_), c10::Error);
  options_.page = write("other.html", "@RESULTS@\n@library vega\n");
  EXPECT_THROW(make_report({folder_.path()}, options_), c10::Error);
  options_.page = folder_ / "missing.html";
  EXPECT_THROW(make_report({folder_.path()}, options_), Error);
}

TEST_F(Report, RejectsAnEmptyListOfResults) {
  EXPECT_THROW(make_report({}, options_), c10::Error);
  EXPECT_THROW(make_report({folder_.path()}, options_), c10::Error);
}

TEST_F(Report, HasABuiltInPageOrGivesTheReason) {
  write("results.jsonl", run("a").dump() + "\n");
  try {
    const std::string page = make_report({folder_.path()});
    EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
    EXPECT_NE(page.find("University of Washington"), std::string::npos);
  } catch (const c10::Error& error) {
    EXPECT_NE(error.msg().find("scripts/page.sh"), std::string::npos);
  }
}

TEST_F(Report, ReportsAMissingBrowser) {
  EXPECT_THROW(save_plots(options_.page, folder_.path(), "no-such-browser"),
               c10::Error);
}

}  // namespace
}  // namespace reprise
