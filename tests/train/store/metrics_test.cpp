#include "train/store/metrics.h"

#include "base/file_size_limit.h"
#include "train/runs.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <sstream>

namespace reprise {
namespace {

using detail::Metrics;
using nlohmann::json;

/// Metrics in a new run directory, with TensorBoard files.
struct Written {
  Written() {
    metrics.emplace(&directory, 0, base / "events", &warnings,
                    testing::device());
  }
  void add(int64_t step, double loss) {
    metrics->add(step, torch::full({}, loss, torch::device(testing::device())),
                 {}, 0.1, 8);
  }
  std::vector<json> lines() const {
    std::istringstream text(read_text(directory.metrics_path()));
    std::vector<json> list;
    for (std::string line; std::getline(text, line);) {
      list.push_back(json::parse(line));
    }
    return list;
  }
  uintmax_t event_bytes() const {
    uintmax_t bytes = 0;
    for (const auto& entry :
         std::filesystem::directory_iterator(base / "events")) {
      bytes += entry.file_size();
    }
    return bytes;
  }

  testing::TemporaryDirectory base;
  RunDirectory directory = RunDirectory::create(base / "run", "{}");
  testing::Warnings warnings;
  std::optional<Metrics> metrics;
};

TEST(Metrics, CollectsInOrder) {
  Written written;
  int step = 0;
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k <= i; ++k) {
      ++step;
      written.add(step, 0.5 * step);
    }
    written.metrics->collect();
    // On CUDA, the last values are on their way.
    const int on_the_way = testing::device().is_cuda() ? i + 1 : 0;
    EXPECT_EQ(written.lines().size(), static_cast<size_t>(step - on_the_way));
  }
  ++step;
  written.add(step, 0.5 * step);
  written.metrics->flush();
  const auto lines = written.lines();
  ASSERT_EQ(lines.size(), static_cast<size_t>(step));
  for (int i = 1; i <= step; ++i) {
    EXPECT_EQ(lines[static_cast<size_t>(i) - 1]["step"], i);
    EXPECT_EQ(lines[static_cast<size_t>(i) - 1]["loss"], 0.5 * i);
  }
  EXPECT_EQ(written.metrics->last_loss(), 0.5 * step);
}

TEST(Metrics, WritesUpdatesInOrder) {
  Written written;
  for (int i = 1; i <= 3; ++i) written.add(i, 0.5 * i);
  EXPECT_TRUE(written.lines().empty());  // still on the device
  written.metrics->flush();
  const auto lines = written.lines();
  ASSERT_EQ(lines.size(), 3u);
  for (int i = 1; i <= 3; ++i) {
    const json& line = lines[static_cast<size_t>(i) - 1];
    EXPECT_EQ(line["step"], i);
    EXPECT_EQ(line["loss"], 0.5 * i);
    EXPECT_EQ(line["samples"], 8);
    EXPECT_FALSE(line.contains("norm"));
  }
  EXPECT_EQ(written.metrics->last_loss(), 1.5);
}

TEST(Metrics, WarnsOnceOfALossThatIsNotFinite) {
  Written written;
  written.add(1, std::numeric_limits<double>::quiet_NaN());
  written.add(2, std::numeric_limits<double>::infinity());
  written.metrics->flush();
  EXPECT_EQ(written.warnings.count("the loss of update 1 is nan"), 1);
  EXPECT_EQ(written.warnings.list.size(), 1u);
  EXPECT_EQ(written.lines().at(1)["loss"], "inf");
}

TEST(Metrics, ContinuesWithAFullDisk) {
  Written written;
  const uintmax_t before = written.event_bytes();
  {
    const testing::FileSizeLimit full(1);
    written.add(1, 1);
    written.metrics->flush();
    written.add(2, 2);
    written.metrics->flush();
  }
  // One warning per file, not one per update.
  EXPECT_EQ(written.warnings.list.size(), 2u);
  EXPECT_EQ(written.event_bytes(), before);
  EXPECT_TRUE(written.lines().empty());
  written.add(3, 3);
  written.metrics->flush();
  ASSERT_EQ(written.lines().size(), 1u);
  EXPECT_EQ(written.lines()[0]["step"], 3);
  EXPECT_GT(written.event_bytes(), before);
  EXPECT_EQ(written.warnings.list.size(), 2u);
}

}  // namespace
}  // namespace reprise
