#pragma once

#include <cstdio>
#include <cstdlib>
#include <ftw.h>
#include <string>
#include <unistd.h>

namespace reprise::testing {

/// A directory in TMPDIR or /tmp that is removed by the destructor. It does not use
/// std::filesystem::remove_all, because PyTorch's builds of LibTorch export symbols of
/// another libstdc++, and the mixture crashes.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    const char* base = std::getenv("TMPDIR");
    path_ =
        std::string(base == nullptr ? "/tmp" : base) + "/reprise-test-XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) {
      std::perror(path_.c_str());
      std::abort();
    }
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
