#pragma once

#include <cstdio>
#include <cstdlib>
#include <ftw.h>
#include <string>
#include <unistd.h>

namespace reprise::testing {

/// A directory that is gone when the test ends. (Not std::filesystem's
/// remove_all: PyTorch's own builds of LibTorch export parts of another
/// libstdc++'s, and the mixture crashes.)
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    char name[] = "/tmp/reprise-test-XXXXXX";
    path_ = mkdtemp(name);
  }
  ~TemporaryDirectory() {
    const auto remove_one = [](const char* path, const struct stat*, int,
                               struct FTW*) { return std::remove(path); };
    nftw(path_.c_str(), remove_one, 16, FTW_DEPTH | FTW_PHYS);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const {
    return path_ + "/" + name;
  }

 private:
  std::string path_;
};

}  // namespace reprise::testing
