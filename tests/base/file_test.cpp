#include "base/file.h"

#include "base/file_size_limit.h"
#include "data/files.h"
#include "support.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <fcntl.h>
#include <set>
#include <sys/stat.h>
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

TEST(File, ReplacesNothingButRegularFiles) {
  const Folder folder;
  std::filesystem::create_directories(folder / "d/inside");
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  const auto refused = [](const std::string& path, const char* what) {
    const std::string text = error_of([&] { AtomicFile file(path); });
    EXPECT_NE(text.find(path), std::string::npos) << text;
    EXPECT_NE(text.find(what), std::string::npos) << text;
  };
  refused(folder / "d", "it is a directory");
  refused(folder / "pipe", "it is a named pipe");
  refused("/dev/null", "it is a device");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
  // One that appears while the file is written.
  AtomicFile file(folder / "late");
  std::filesystem::create_directory(folder / "late");
  EXPECT_NE(error_of([&] { file.commit(); }).find("it is a directory"),
            std::string::npos);
}

TEST(File, KeepsLinksAndPermissions) {
  const Folder folder;
  std::filesystem::create_directory(folder / "there");
  write_bytes(folder / "there/f", "before");
  ASSERT_EQ(chmod((folder / "there/f").c_str(), 0640), 0);
  std::filesystem::create_symlink("there/f", folder / "link");
  std::filesystem::create_symlink("there/new", folder / "dangling");
  std::filesystem::create_symlink("circle", folder / "circle");
  for (const char* name : {"link", "dangling"}) {
    AtomicFile file(folder / name);
    file.write("after");
    file.commit();
    EXPECT_TRUE(std::filesystem::is_symlink(folder / name));
  }
  EXPECT_EQ(read_text(folder / "there/f"), "after");
  EXPECT_EQ(read_text(folder / "there/new"), "after");
  struct stat status {};
  ASSERT_EQ(stat((folder / "there/f").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0640u);
  EXPECT_NE(error_of([&] {
              AtomicFile file(folder / "circle");
            }).find("symbolic links"),
            std::string::npos);
}

/// A link with the name of a temporary file would lead the bytes elsewhere.
TEST(File, TemporaryNamesAreNotPredictable) {
  const Folder folder;
  std::set<std::string> names;
  for (int i = 0; i < 50; ++i) {
    const AtomicFile file(folder / "f");
    for (const auto& entry : std::filesystem::directory_iterator(folder / "")) {
      const std::string name = entry.path().filename().string();
      EXPECT_TRUE(reprise::is_temporary_file(name)) << name;
      EXPECT_EQ(name.find(std::to_string(getpid())), std::string::npos);
      EXPECT_TRUE(names.insert(name).second);
    }
  }
  EXPECT_EQ(names.size(), 50u);
  EXPECT_EQ(entries(folder / ""), 0u);
  EXPECT_FALSE(reprise::is_temporary_file("f.txt"));
}

TEST(File, RewritesBytes) {
  const Folder folder;
  AtomicFile file(folder / "f");
  file.write("0123456789");
  file.rewrite(2, "ab");
  file.write("end");
  file.commit();
  EXPECT_EQ(read_text(folder / "f"), "01ab456789end");
}

TEST(File, MakesDirectories) {
  const Folder folder;
  reprise::make_directories(folder / "a/b/c");
  EXPECT_TRUE(std::filesystem::is_directory(folder / "a/b/c"));
  reprise::make_directories(folder / "a/b/../d/");
  EXPECT_TRUE(std::filesystem::is_directory(folder / "a/d"));
  write_bytes(folder / "file", "text");
  for (const char* path : {"file", "file/below"}) {
    const std::string text =
        error_of([&] { reprise::make_directories(folder / path); });
    EXPECT_NE(text.find("cannot make the directory " + (folder / path)),
              std::string::npos)
        << text;
  }
  EXPECT_NE(error_of([&] {
              reprise::sync_directory(folder / "none");
            }).find(folder / "none"),
            std::string::npos);
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
  EXPECT_NE(error_of([&] { read_text(folder / ""); }).find("is a directory"),
            std::string::npos);
}

}  // namespace
