#include "base/file.h"
#include "support.h"
#include "temporary.h"

#include <reprise/study/runner.h>

#include <gtest/gtest.h>

#include <fstream>

namespace reprise {
namespace {

using testing::TemporaryDirectory;

std::string run(const std::string& id, int value) {
  return R"({"type":"run","id":")" + id + R"(","value":)" +
         std::to_string(value) + "}";
}

void write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

TEST(Results, ReturnsStudiesFirstAndTheLastRunOfAnId) {
  const TemporaryDirectory base;
  write(base.path() + "/results.jsonl",
        run("a", 1) + "\n" + R"({"type":"study","study":"x"})" + "\n" +
            run("b", 2) + "\n" + run("a", 3) + "\n");
  const std::vector<std::string> expected = {R"({"type":"study","study":"x"})",
                                             run("b", 2), run("a", 3)};
  EXPECT_EQ(read_results({base.path()}), expected);
  EXPECT_EQ(read_results({base.path() + "/results.jsonl"}), expected);
}

TEST(Results, MergesSeveralFiles) {
  const TemporaryDirectory base;
  write(base.path() + "/one.jsonl", run("a", 1) + "\n" + run("b", 1) + "\n");
  write(base.path() + "/two.jsonl", run("b", 2) + "\n" + run("c", 2) + "\n");
  EXPECT_EQ(
      read_results({base.path() + "/one.jsonl", base.path() + "/two.jsonl"}),
      (std::vector<std::string>{run("a", 1), run("b", 2), run("c", 2)}));
}

TEST(Results, IgnoresAnIncompleteLastLine) {
  const TemporaryDirectory base;
  const std::string path = base.path() + "/results.jsonl";
  const std::string whole = run("a", 1) + "\n" + run("b", 2) + "\n";
  // Truncated at every byte.
  for (size_t length = 0; length <= whole.size(); ++length) {
    write(path, whole.substr(0, length));
    const size_t lines = length < run("a", 1).size() + 1 ? 0
                         : length < whole.size()         ? 1
                                                         : 2;
    EXPECT_EQ(read_results({base.path()}).size(), lines) << length;
  }
}

TEST(Results, ReportsTheLineThatIsNotAResult) {
  const TemporaryDirectory base;
  write(base.path() + "/results.jsonl", run("a", 1) + "\nnonsense\n");
  const auto error = testing::error_of([&] { read_results({base.path()}); });
  EXPECT_NE(error.find("line 2"), std::string::npos) << error;
  EXPECT_NE(testing::error_of([&] {
              read_results({base.path() + "/none"});
            }).find("is not there"),
            std::string::npos);
}

TEST(Results, AppendsAfterTruncatingAnIncompleteLine) {
  const TemporaryDirectory base;
  const std::string folder = base.path() + "/deep/study";
  {
    ResultsFile file(folder);
    file.append(run("a", 1));
    file.append(run("b", 2));
    EXPECT_NE(testing::error_of([&] {
                ResultsFile second(folder);
              }).find("another process"),
              std::string::npos);
  }
  std::ofstream(folder + "/results.jsonl", std::ios::app) << R"({"type":"ru)";
  {
    ResultsFile file(folder);
    file.append(run("c", 3));
  }
  EXPECT_EQ(read_text(folder + "/results.jsonl"),
            run("a", 1) + "\n" + run("b", 2) + "\n" + run("c", 3) + "\n");
}

}  // namespace
}  // namespace reprise
