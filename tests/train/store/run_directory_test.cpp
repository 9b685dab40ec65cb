#include "base/file.h"
#include "support.h"
#include "temporary.h"
#include "train/store/metrics_log.h"
#include "train/store/run_state.h"

#include <reprise/base/error.h>
#include <reprise/train/config.h>
#include <reprise/train/run_directory.h>

#include <filesystem>
#include <fstream>

namespace reprise {
namespace {

namespace fs = std::filesystem;
using testing::error_of;

const std::string kConfig = to_json(TrainConfig());

NamedTensors tensors(double value) {
  return {{"parameter.a", torch::full({3}, value)}};
}

TEST(RunDirectory, KeepsTheLastStatesAndFindsTheNewest) {
  const testing::TemporaryDirectory temporary;
  const std::string& base = temporary.path();
  {
    auto run = RunDirectory::create(base + "/run", kConfig);
    EXPECT_FALSE(detail::newest_state(run, [](const auto&) {}).has_value());
    for (int i = 1; i <= 4; ++i) {
      detail::RunState state;
      state.step = i;
      state.micro = i % 2;
      state.train_s = 0.1 * i;
      state.position = {i, 7};
      detail::save_state(run, state, tensors(i), /*keep=*/2);
    }
    const auto saved = detail::newest_state(run, [](const auto&) { FAIL(); });
    ASSERT_TRUE(saved.has_value());
    EXPECT_EQ(saved->state.step, 4);
    EXPECT_EQ(saved->state.train_s, 0.1 * 4);
    EXPECT_EQ(saved->state.position, (LoaderPosition{4, 7}));
    EXPECT_EQ(saved->tensors.at(0).first, "parameter.a");
    EXPECT_TRUE(torch::equal(saved->tensors[0].second, torch::full({3}, 4.0)));
    int states = 0;
    for (const auto& entry : fs::directory_iterator(base + "/run")) {
      states += entry.path().extension() == ".safetensors";
    }
    EXPECT_EQ(states, 2);

    // A damaged newest state is set aside with a warning that names it.
    fs::resize_file(saved->path, fs::file_size(saved->path) - 5);
    std::string warning;
    const auto older =
        detail::newest_state(run, [&](const auto& text) { warning = text; });
    ASSERT_TRUE(older.has_value());
    EXPECT_EQ(older->state.step, 3);
    EXPECT_NE(warning.find("state-0000000004"), std::string::npos);
    EXPECT_TRUE(fs::exists(saved->path + ".broken"));
    EXPECT_FALSE(fs::exists(saved->path));
  }
}

TEST(RunDirectory, UpdatesOptionsAndKeepsOtherValues) {
  const testing::TemporaryDirectory temporary;
  auto run = RunDirectory::create(temporary.path() + "/run",
                                  R"({"own": "kept", "batch": 1})");
  TrainOptions options;
  options.batch = 7;
  run.update_config(to_json(options));
  const std::string text = run.config();
  EXPECT_NE(text.find(R"("own": "kept")"), std::string::npos) << text;
  EXPECT_EQ(options_from_json(text).batch, 7);
  run.set_config("not JSON");
  EXPECT_NE(error_of([&] { run.update_config("{}"); }).find("config.json"),
            std::string::npos);
}

TEST(RunDirectory, RejectsDirectoriesInUse) {
  const testing::TemporaryDirectory temporary;
  const std::string& base = temporary.path();
  {
    auto run = RunDirectory::create(base, kConfig);
    EXPECT_NE(error_of([&] {
                RunDirectory::create(base, kConfig);
              }).find("holds a run already; continue it with --resume"),
              std::string::npos);
    EXPECT_NE(error_of([&] {
                RunDirectory::open(base);
              }).find("another process is training in"),
              std::string::npos);
  }
  RunDirectory::open(base);  // the lock was released
  EXPECT_NE(error_of([&] { RunDirectory::open("/tmp"); }).find("holds no run"),
            std::string::npos);
  std::ofstream(base + "/file") << "x";
  EXPECT_NE(error_of([&] {
              RunDirectory::create(base + "/file/run", kConfig);
            }).find("cannot make the directory"),
            std::string::npos);
}

TEST(RunDirectory, TruncatesMetricsToTheState) {
  const testing::TemporaryDirectory temporary;
  const std::string& base = temporary.path();
  int64_t bytes = 0;
  {
    detail::MetricsLog log(base + "/m", 0);
    log.write("one");
    log.sync();
    bytes = log.bytes();
    log.write("two");
  }
  {
    detail::MetricsLog log(base + "/m", bytes);
    log.write("three");
  }
  EXPECT_EQ(read_text(base + "/m"), "one\nthree\n");
}

TEST(RunDirectory, KeepsWhatIsLeftOfMetrics) {
  const testing::TemporaryDirectory temporary;
  const std::string path = temporary.path() + "/m";
  EXPECT_EQ(detail::MetricsLog(path, 100).missing_bytes(), 100);
  std::ofstream(path) << "one\ntw";
  detail::MetricsLog log(path, 100);
  EXPECT_EQ(log.missing_bytes(), 94);
  log.write("two");
  EXPECT_EQ(read_text(path), "one\ntwo\n");
}

TEST(RunDirectory, RemovesTemporaryFilesOfKilledProcesses) {
  const testing::TemporaryDirectory temporary;
  const std::string base = temporary.path() + "/run";
  RunDirectory::create(base, kConfig);
  const std::vector<std::string> theirs{"config.json.tmp-0123456789abcdef",
                                        "state-1-0.safetensors.tmp-00"};
  const std::vector<std::string> others{"notes.tmp-1", "state-notes"};
  for (const auto& name : theirs) std::ofstream(base + "/" + name) << "x";
  for (const auto& name : others) std::ofstream(base + "/" + name) << "x";
  RunDirectory::open(base);
  for (const auto& name : theirs) EXPECT_FALSE(fs::exists(base + "/" + name));
  for (const auto& name : others) EXPECT_TRUE(fs::exists(base + "/" + name));
}

}  // namespace
}  // namespace reprise
