#include "base/file.h"

#include "data/files.h"
#include "support.h"

#include <gtest/gtest.h>

#include <csignal>
#include <sys/resource.h>

namespace {

using namespace reprise::testing;
using reprise::AtomicFile;
using reprise::read_text;

size_t entries(const std::string& folder) {
  return static_cast<size_t>(
      std::distance(std::filesystem::directory_iterator(folder), {}));
}

TEST(File, CommitPutsTheWholeFileInPlace) {
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

TEST(File, WithoutCommitNothingChanges) {
  const Folder folder;
  write_bytes(folder / "f", "before");
  {
    AtomicFile file(folder / "f");
    file.write("after");
  }
  EXPECT_EQ(read_text(folder / "f"), "before");
  EXPECT_EQ(entries(folder / ""), 1u);
}

TEST(File, CommitReplaces) {
  const Folder folder;
  write_bytes(folder / "f", "before, and longer");
  AtomicFile file(folder / "f");
  file.write("after");
  file.commit();
  EXPECT_EQ(read_text(folder / "f"), "after");
}

TEST(File, SaysThePathAndTheReason) {
  const Folder folder;
  const auto says = [](const std::string& path, const std::string& reason) {
    const std::string text = error_of([&] { AtomicFile file(path); });
    EXPECT_NE(text.find(path), std::string::npos) << text;
    EXPECT_NE(text.find(reason), std::string::npos) << text;
  };
  says(folder / "none/f", "No such file or directory");
  // Root may write anywhere, but not below a plain file.
  write_bytes(folder / "plain", "x");
  says(folder / "plain/f", "Not a directory");
}

TEST(File, CannotTakeADirectorysPlace) {
  const Folder folder;
  std::filesystem::create_directories(folder / "d/inside");
  {
    AtomicFile file(folder / "d");
    EXPECT_NE(error_of([&] { file.commit(); }).find("directory"),
              std::string::npos);
  }
  EXPECT_EQ(entries(folder / ""), 1u);
}

/// A limit on the size of files stands for a full disk.
TEST(File, FullDiskLeavesWhatWasThere) {
  const Folder folder;
  write_bytes(folder / "f", "before");
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit = before;
  limit.rlim_cur = 4096;
  setrlimit(RLIMIT_FSIZE, &limit);
  std::string text;
  {
    AtomicFile file(folder / "f");
    text = error_of([&] { file.write(std::string(8192, 'x')); });
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(text.find("File too large"), std::string::npos) << text;
  EXPECT_EQ(read_text(folder / "f"), "before");
  EXPECT_EQ(entries(folder / ""), 1u);
}

TEST(File, ReadTextSaysWhyItCannot) {
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
