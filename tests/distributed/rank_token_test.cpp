#include "distributed/rank_token.h"

#include "base/file.h"
#include "support.h"
#include "temporary.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <sys/stat.h>

namespace reprise::testing {
namespace {

using Variables = std::map<std::string, std::string>;

std::string token_in(const Variables& variables) {
  return detail::rank_token([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::string() : found->second;
  });
}

void write_file(const std::string& path, const std::string& text, mode_t mode) {
  std::ofstream(path) << text;
  ASSERT_EQ(chmod(path.c_str(), mode), 0);
}

/// Sets a variable of this process while it exists.
class Setting {
 public:
  Setting(const char* name, const std::string& value) : name_(name) {
    const char* const before = std::getenv(name);
    if (before != nullptr) before_ = before;
    setenv(name, value.c_str(), 1);
  }
  ~Setting() {
    before_.empty() ? unsetenv(name_) : setenv(name_, before_.c_str(), 1);
  }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
  std::string before_;
};

TEST(RankToken, IsTheVariablesFirst) {
  const std::string token = detail::new_rank_token();
  EXPECT_EQ(token.size(), 64u);
  EXPECT_NE(token, detail::new_rank_token());
  EXPECT_EQ(token_in({{"REPRISE_RANK_TOKEN", token},
                      {"REPRISE_RANK_TOKEN_FILE", "/no/such/file"}}),
            token);
  EXPECT_NE(error_of([] {
              token_in({{"REPRISE_RANK_TOKEN", "short"}});
            })
                .find("expected a token of 16 characters or more in "
                      "REPRISE_RANK_TOKEN, got 5"),
            std::string::npos);
}

TEST(RankToken, ReadsAFileThatNobodyElseCanRead) {
  const TemporaryDirectory folder;
  const std::string path = folder / "token";
  const Variables variables = {{"REPRISE_RANK_TOKEN_FILE", path}};
  const auto error = [&] { return error_of([&] { token_in(variables); }); };
  EXPECT_NE(error().find(path + ": No such file"), std::string::npos);
  write_file(path, "a long enough token\n", 0600);
  EXPECT_EQ(token_in(variables), "a long enough token");
  for (const mode_t mode : {0640, 0604, 0660}) {
    write_file(path, "a long enough token\n", mode);
    EXPECT_NE(error().find("use chmod 600 " + path), std::string::npos);
  }
  write_file(path, "\n", 0600);
  EXPECT_NE(error().find("expected a token of 16"), std::string::npos);
  std::remove(path.c_str());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_NE(error().find("expected a token in a file"), std::string::npos);
}

TEST(RankToken, OtherwiseTheUserHasAKey) {
  const TemporaryDirectory folder;
  const Setting cache("XDG_CACHE_HOME", folder / "cache");
  const std::string first = token_in({});
  EXPECT_EQ(first.size(), 64u);
  EXPECT_EQ(token_in({}), first);
  const std::string path = folder / "cache/reprise/rank-key";
  EXPECT_EQ(read_text(path), first + "\n");
  struct stat facts {};
  ASSERT_EQ(stat(path.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 07777, 0600u);
}

TEST(RankToken, TheKeyNeedsNoHomeDirectory) {
  const TemporaryDirectory folder;
  write_file(folder / "file", "", 0600);
  const Setting cache("XDG_CACHE_HOME", folder / "file");
  EXPECT_EQ(token_in({}).size(), 64u);
  EXPECT_EQ(token_in({}), token_in({}));
}

}  // namespace
}  // namespace reprise::testing
