#include "base/paths.h"

#include "environment.h"
#include "temporary.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sys/stat.h>

namespace reprise {
namespace {

using testing::Environment;

TEST(Paths, CacheDirectoryFollowsTheXdgRules) {
  const Environment home("HOME", "/home/someone");
  {
    const Environment cache("XDG_CACHE_HOME", "/cache");
    EXPECT_EQ(cache_directory(), "/cache/reprise");
  }
  {
    const Environment cache("XDG_CACHE_HOME", "");
    EXPECT_EQ(cache_directory(), "/home/someone/.cache/reprise");
  }
  const Environment cache("XDG_CACHE_HOME", nullptr);
  EXPECT_EQ(cache_directory(), "/home/someone/.cache/reprise");
  const Environment no_home("HOME", nullptr);
  EXPECT_EQ(cache_directory(), "");
}

TEST(Paths, FindsProgramsInPathInOrder) {
  const testing::TemporaryDirectory folder;
  const auto make = [&](const std::string& path, mode_t mode) {
    std::filesystem::create_directories(
        std::filesystem::path(folder / path).parent_path());
    std::ofstream(folder / path) << "#!/bin/sh\n";
    chmod((folder / path).c_str(), mode);
  };
  make("a/plain", 0644);
  make("b/plain", 0755);
  make("c/plain", 0755);
  std::filesystem::create_directories(folder / "b/directory");
  const std::string list =
      (folder / "a") + ":" + (folder / "b") + ":" + (folder / "c");
  const Environment path("PATH", list.c_str());
  EXPECT_EQ(find_program("plain"), folder / "b/plain");
  EXPECT_EQ(find_program("directory"), "");
  EXPECT_EQ(find_program("missing"), "");
  EXPECT_EQ(find_program(folder / "c/plain"), folder / "c/plain");
  EXPECT_EQ(find_program(folder / "a/plain"), "");
}

TEST(Paths, TemporaryDirectoryIsRemovedWithItsContents) {
  const testing::TemporaryDirectory parent;
  const Environment variable("TMPDIR", parent.path().c_str());
  std::string path;
  {
    const reprise::TemporaryDirectory directory("prefix-");
    path = directory.path();
    EXPECT_TRUE(path.starts_with(parent / "prefix-")) << path;
    std::filesystem::create_directories(path + "/a/b");
    std::ofstream(path + "/a/b/file") << "text";
    // A link is removed, not what it points to.
    std::ofstream(parent / "outside") << "text";
    std::filesystem::create_symlink(parent / "outside", path + "/link");
  }
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_TRUE(std::filesystem::exists(parent / "outside"));
}

}  // namespace
}  // namespace reprise
