#include "base/file.h"

#include "base/file_size_limit.h"
#include "data/files.h"
#include "support.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <fcntl.h>
#include <thread>
#include <unistd.h>

namespace {

using namespace reprise::testing;
using reprise::AtomicFile;
using reprise::read_text;
using reprise::why_directory_unwritable;
using reprise::write_all;

size_t entries(const std::string& folder) {
  return static_cast<size_t>(
      std::distance(std::filesystem::directory_iterator(folder), {}));
}

TEST(File, CommitCreatesTheFile) {
  const Folder folder;
  const std::string binary("a\0b\n", 4);
  {
    AtomicFile file(folder / "f");
    file.write("first, ");
    file.write(binary.data(), binary.size());
    EXPECT_FALSE(std::filesystem::exists(folder / "f"));
    file.commit();
    EXPECT_EQ(read_text(folder / "f"), "first, " + binary);
  }
  EXPECT_EQ(read_text(folder / "f"), "first, " + binary);
  EXPECT_EQ(entries(folder / ""), 1u);
}

TEST(File, NothingChangesWithoutCommit) {
  const Folder folder;
  write_bytes(folder / "f", "before");
  {
    AtomicFile file(folder / "f");
    file.write("after");
  }
  EXPECT_EQ(read_text(folder / "f"), "before");
  EXPECT_EQ(entries(folder / ""), 1u);
}

TEST(File, SaysWhyADirectoryCannotBeWritten) {
  const Folder folder;
  EXPECT_EQ(why_directory_unwritable(folder / "new/deep"), "");
  EXPECT_FALSE(std::filesystem::exists(folder / "new"));
  EXPECT_EQ(entries(folder / ""), 0u);  // its trial file is gone
  write_bytes(folder / "file", "text");
  EXPECT_EQ(why_directory_unwritable(folder / "file/run"),
            "cannot make the directory " + (folder / "file/run") + ": " +
                (folder / "file") + " is no directory");
}

TEST(File, CommitReplacesTheFile) {
  const Folder folder;
  write_bytes(folder / "f", "before, and longer");
  AtomicFile file(folder / "f");
  file.write("after");
  file.commit();
  EXPECT_EQ(read_text(folder / "f"), "after");
}

TEST(File, ErrorsNameThePathAndTheReason) {
  const Folder folder;
  const auto says = [](const std::string& path, const std::string& reason) {
    const std::string text = error_of([&] { AtomicFile file(path); });
    EXPECT_NE(text.find(path), std::string::npos) << text;
    EXPECT_NE(text.find(reason), std::string::npos) << text;
  };
  says(folder / "none/f", "No such file or directory");
  // Even root cannot create a file below a regular file.
  write_bytes(folder / "plain", "x");
  says(folder / "plain/f", "Not a directory");
}

TEST(File, CannotReplaceADirectory) {
  const Folder folder;
  std::filesystem::create_directories(folder / "d/inside");
  {
    AtomicFile file(folder / "d");
    EXPECT_NE(error_of([&] { file.commit(); }).find("directory"),
              std::string::npos);
  }
  EXPECT_EQ(entries(folder / ""), 1u);
}

/// RLIMIT_FSIZE simulates a full disk.
TEST(File, FullDiskLeavesTheOldFile) {
  const Folder folder;
  write_bytes(folder / "f", "before");
  std::string text;
  {
    const FileSizeLimit limit(4096);
    AtomicFile file(folder / "f");
    text = error_of([&] { file.write(std::string(8192, 'x')); });
  }
  EXPECT_NE(text.find("File too large"), std::string::npos) << text;
  EXPECT_EQ(read_text(folder / "f"), "before");
  EXPECT_EQ(entries(folder / ""), 1u);
}

TEST(File, WriteAllReportsAFullDisk) {
  const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(full, 0);
  EXPECT_TRUE(write_all(full, "", 0));
  EXPECT_FALSE(write_all(full, "text", 4));
  EXPECT_EQ(errno, ENOSPC);
  close(full);
  EXPECT_FALSE(write_all(-1, "text", 4));
  EXPECT_EQ(errno, EBADF);
}

/// A pipe takes 64 KiB at once, so that the rest is written after a short write.
TEST(File, WriteAllResumesAfterShortWrites) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const std::string text(300'000, 'x');
  std::thread writer([&] {
    EXPECT_TRUE(write_all(ends[1], text.data(), text.size()));
    close(ends[1]);
  });
  std::string got;
  char part[4096];
  for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) {
    got.append(part, static_cast<size_t>(n));
  }
  writer.join();
  close(ends[0]);
  EXPECT_EQ(got, text);
}

TEST(File, ReadTextReportsTheReason) {
  const Folder folder;
  const std::string text = error_of([&] { read_text(folder / "none"); });
  EXPECT_NE(text.find(folder / "none"), std::string::npos) << text;
  EXPECT_NE(text.find("No such file"), std::string::npos) << text;
  write_bytes(folder / "empty", "");
  EXPECT_EQ(read_text(folder / "empty"), "");
  EXPECT_NE(error_of([&] { read_text(folder / ""); }).find("Is a directory"),
            std::string::npos);
}

}  // namespace
