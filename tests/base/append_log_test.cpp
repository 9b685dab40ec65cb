#include "base/append_log.h"

#include "base/file.h"
#include "base/file_size_limit.h"
#include "support.h"
#include "temporary.h"

#include <reprise/base/error.h>

#include <fstream>
#include <sys/stat.h>

namespace reprise::detail {
namespace {

using testing::error_of;
using testing::FileSizeLimit;
using testing::TemporaryDirectory;

void write_file(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

TEST(AppendLog, AppendsToWhatTheFileHolds) {
  const TemporaryDirectory folder;
  write_file(folder / "log", "one\n");
  AppendLog log(folder / "log", "test");
  EXPECT_EQ(log.bytes(), 4);
  log.append("two\n");
  log.append(std::string_view("\0\n", 2));
  EXPECT_EQ(log.bytes(), 10);
  log.sync();
  EXPECT_EQ(read_text(folder / "log"), std::string("one\ntwo\n\0\n", 10));
}

TEST(AppendLog, RemovesAnIncompleteLastLine) {
  const TemporaryDirectory folder;
  const auto left = [&](const std::string& text) {
    write_file(folder / "log", text);
    AppendLog log(folder / "log", "test");
    log.truncate_incomplete_line();
    EXPECT_EQ(log.bytes(), int64_t(read_text(folder / "log").size()));
    return read_text(folder / "log");
  };
  EXPECT_EQ(left("one\ntwo\nthr"), "one\ntwo\n");
  EXPECT_EQ(left("one\n"), "one\n");
  EXPECT_EQ(left("on"), "");
  EXPECT_EQ(left(""), "");
}

TEST(AppendLog, TruncatesToALength) {
  const TemporaryDirectory folder;
  write_file(folder / "log", "one\ntwo\nthree\n");
  AppendLog log(folder / "log", "test");
  log.truncate(4);
  log.append("four\n");
  EXPECT_EQ(read_text(folder / "log"), "one\nfour\n");
  EXPECT_EQ(
      error_of([&] { log.truncate(10); }),
      "[test] expected at least 10 bytes in " + (folder / "log") + ", found 9");
}

/// The disk fills up in the middle of a record and has space again later.
TEST(AppendLog, AFailedAppendLeavesCompleteRecordsOnly) {
  const TemporaryDirectory folder;
  AppendLog log(folder / "log", "test");
  log.append("first\n");
  {
    const FileSizeLimit limit(1000);
    const std::string line(5000, 'x');
    EXPECT_EQ(error_of([&] { log.append(line + "\n"); }),
              "[test] cannot write " + (folder / "log") + ": File too large");
    EXPECT_EQ(read_text(folder / "log"), "first\n");
    EXPECT_EQ(log.bytes(), 6);
    log.append("short\n");
  }
  log.append(std::string(5000, 'y') + "\n");
  EXPECT_EQ(read_text(folder / "log"),
            "first\nshort\n" + std::string(5000, 'y') + "\n");
}

TEST(AppendLog, ReportsAFullDevice) {
  AppendLog log("/dev/full", "test");
  EXPECT_EQ(error_of([&] { log.append("x\n"); }),
            "[test] cannot write /dev/full: No space left on device");
}

TEST(AppendLog, CreateNewFailsIfTheFileExists) {
  const TemporaryDirectory folder;
  { AppendLog(folder / "log", "test", AppendLog::Mode::kCreateNew); }
  EXPECT_THROW(AppendLog(folder / "log", "test", AppendLog::Mode::kCreateNew),
               Error);
  EXPECT_THROW(AppendLog(folder / "none/log", "test"), Error);
}

TEST(AppendLog, LockIsExclusiveAndReleasedOnClosing) {
  const TemporaryDirectory folder;
  AppendLog second(folder / "log", "test");
  {
    AppendLog first(folder / "log", "test");
    EXPECT_TRUE(first.try_lock());
    EXPECT_FALSE(second.try_lock());
    first.append("from the first\n");
  }
  EXPECT_TRUE(second.try_lock());
  EXPECT_EQ(second.bytes(), 15);
  // What the first one wrote must survive a failed append.
  const FileSizeLimit limit(100);
  EXPECT_THROW(second.append(std::string(200, 'x')), Error);
  EXPECT_EQ(read_text(folder / "log"), "from the first\n");
}

}  // namespace
}  // namespace reprise::detail
