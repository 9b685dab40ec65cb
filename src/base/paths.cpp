#include "base/paths.h"

#include "base/throw_error.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <ftw.h>
#include <sstream>
#include <unistd.h>

namespace reprise {
namespace {

namespace fs = std::filesystem;

bool is_executable(const std::string& path) {
  std::error_code error;
  return access(path.c_str(), X_OK) == 0 && !fs::is_directory(path, error);
}

}  // namespace

std::string environment_variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string cache_directory() {
  const std::string cache = environment_variable("XDG_CACHE_HOME");
  if (!cache.empty()) return fs::path(cache) / "reprise";
  const std::string home = environment_variable("HOME");
  if (home.empty()) return "";
  return fs::path(home) / ".cache" / "reprise";
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    return is_executable(name) ? name : "";
  }
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "/usr/bin:/bin" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string program = (fs::path(folder) / name).string();
    if (is_executable(program)) return program;
  }
  return "";
}

TemporaryDirectory::TemporaryDirectory(const std::string& prefix) {
  const std::string parent = environment_variable("TMPDIR");
  path_ = (parent.empty() ? "/tmp" : parent) + "/" + prefix + "XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) {
    detail::throw_error("[file] cannot make a directory like {}: {}", path_,
                        detail::system_reason());
  }
}

TemporaryDirectory::~TemporaryDirectory() {
  // Not std::filesystem::remove_all(): PyTorch's builds of LibTorch export parts of
  // another libstdc++, and mixing the two crashes. See docs/design.md.
  const auto remove_one = [](const char* path, const struct stat*, int, FTW*) {
    std::remove(path);
    return 0;
  };
  nftw(path_.c_str(), remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

}  // namespace reprise
