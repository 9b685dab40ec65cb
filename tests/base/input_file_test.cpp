#include "base/input_file.h"

#include "base/file.h"
#include "support.h"
#include "temporary.h"

#include <reprise/base/error.h>

#include <fstream>
#include <sys/stat.h>
#include <unistd.h>

namespace reprise {
namespace {

using testing::error_of;
using testing::TemporaryDirectory;

TEST(InputFile, ReadsRangesAndReportsTheEnd) {
  const TemporaryDirectory folder;
  std::ofstream(folder / "a") << "0123456789";
  const InputFile file(folder / "a");
  EXPECT_EQ(file.size(), 10u);
  std::string part(4, ' ');
  file.read(3, part.data(), part.size());
  EXPECT_EQ(part, "3456");
  EXPECT_EQ(file.read_some(8, part.data(), part.size()), 2u);
  EXPECT_EQ(file.read_some(20, part.data(), part.size()), 0u);
  const std::string text = error_of([&] { file.read(8, part.data(), 4); });
  EXPECT_NE(text.find(folder / "a"), std::string::npos) << text;
  EXPECT_NE(text.find("ends after 10 bytes, 12 were expected"),
            std::string::npos)
      << text;
}

TEST(InputFile, FilesThatBecomeShorterAreErrors) {
  const TemporaryDirectory folder;
  std::ofstream(folder / "a") << std::string(100'000, 'x');
  const InputFile file(folder / "a");
  ASSERT_EQ(truncate((folder / "a").c_str(), 10), 0);
  std::string part(4, ' ');
  EXPECT_THROW(file.read(50'000, part.data(), part.size()), Error);
}

TEST(InputFile, RefusesWhatIsNoFileWithoutWaiting) {
  const TemporaryDirectory folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  const std::vector<std::pair<std::string, const char*>> cases = {
      {folder.path(), "a directory"},
      {folder / "pipe", "a named pipe"},
      {"/dev/zero", "a device"}};
  for (const auto& [path, kind] : cases) {
    for (const auto& read : {+[](const std::string& p) { InputFile file(p); },
                             +[](const std::string& p) { read_text(p); }}) {
      const std::string text = error_of([&] { read(path); });
      EXPECT_NE(text.find(path), std::string::npos) << text;
      EXPECT_NE(text.find(kind), std::string::npos) << text;
    }
    EXPECT_EQ(why_not_regular(path), kind);
  }
  EXPECT_EQ(why_not_regular(folder / "none"), "");
  EXPECT_NE(
      error_of([&] { InputFile file(folder / "none"); }).find("No such file"),
      std::string::npos);
}

TEST(InputFile, TextsHaveALimit) {
  const TemporaryDirectory folder;
  std::ofstream(folder / "a") << std::string(5000, 'x');
  EXPECT_EQ(read_text(folder / "a", 5000).size(), 5000u);
  const std::string text = error_of([&] { read_text(folder / "a", 4999); });
  EXPECT_NE(text.find(folder / "a"), std::string::npos) << text;
  EXPECT_NE(text.find("expected at most"), std::string::npos) << text;
  EXPECT_FALSE(read_text("/proc/self/status").empty());  // its size is 0
}

}  // namespace
}  // namespace reprise
